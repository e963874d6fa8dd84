"""The block table of one admitted sequence."""

from __future__ import annotations

from sapwood_server.cache.node import PageNode
from sapwood_server.cache.tokens import TOKEN_BYTES


class BlockTable:
    """Which pages hold the KV of one sequence, position by position, and what of it the tree knows.

    Positions `[0, num_published)` are in the tree: `node` ends their chain and is held. Usually `pages` are the pages
    of that chain; where another sequence had published the same tokens first, the page here is this sequence's own
    duplicate, listed in `private`. Without a prefix cache nothing is ever published and `node` is None.
    """

    __slots__ = ("data", "is_trusted", "node", "num_published", "num_written", "pages", "private", "source")

    def __init__(self, tokens: bytes, node: PageNode | None, pages: list[int], num_tokens: int) -> None:
        self.data = bytearray(tokens)
        """All tokens of the sequence so far, packed; the last ones may have no KV yet."""
        self.node = node
        self.pages = pages
        """Page ids: position p is in slot `p % page_size` of `pages[p // page_size]`. Only ever appended to."""
        self.num_written = num_tokens
        """Leading positions whose KV is in the pages once the copies ordered for them have run."""
        self.num_published = num_tokens
        self.private: list[int] = []
        self.source: PageNode | None = None
        """The page whose first slots were copied when the sequence was admitted."""
        self.is_trusted = True
        """False: what the pages hold led to logits that are not finite."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence so far."""
        return len(self.data) // TOKEN_BYTES

    def append(self, token_id: int) -> None:
        """Add a token that is still to be computed."""
        self.data += token_id.to_bytes(TOKEN_BYTES, "big")

    def unpublished_pages(self, page_size: int) -> list[int]:
        """Pages that the tree has not seen."""
        return self.pages[-(-self.num_published // page_size) :]
