"""One page of the prefix tree."""

from __future__ import annotations

from sapwood_server.cache.tokens import TOKEN_BYTES


class PageNode:
    """A page whose KV is written, under the path of pages that hold the tokens before it.

    `key` is the page's own tokens, packed. Three kinds:

    - *full*: `page_size` tokens; the only kind that has children;
    - *partial*: fewer tokens, left behind by a sequence that ended inside the page; never grows again;
    - *open*: the unfilled last page of a running sequence, which still writes to it. It hangs in its parent's
      `open_pages`, not among the sorted `children`, so that it needs no re-sorting as it grows.

    `uses` counts what keeps the page: sequences whose chain ends here, page copies that read it in this step, and
    children that are in use themselves. A node is *active* iff `uses > 0`; its ancestors then are, too.
    """

    __slots__ = (
        "children",
        "depth",
        "in_tree",
        "is_open",
        "key",
        "keys",
        "last_used",
        "open_pages",
        "page",
        "parent",
        "uses",
    )

    def __init__(self, parent: PageNode | None, page: int, key: bytes) -> None:
        self.parent = parent
        self.page = page
        self.key = key
        self.depth: int = parent.depth + 1 if parent is not None else 0
        """Number of pages from the root to this one, itself included."""
        self.children: dict[bytes, PageNode] = {}
        self.keys: list[bytes] = []
        """The keys of `children`, sorted."""
        self.open_pages: list[PageNode] = []
        self.uses = 0
        self.last_used = 0
        """Tick at which it was last let go; meaningless while active."""
        self.is_open = False
        self.in_tree = True
        """False once evicted, merged or taken over: whoever remembers the node must look for another."""

    @property
    def num_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES

    @property
    def is_evictable(self) -> bool:
        """A leaf of the tree that nothing uses. (An open page is always in use, and so then is its parent.)"""
        return self.in_tree and not self.uses and not self.children and self.parent is not None


class RootNode(PageNode):
    """Where the prefixes of one salt begin. It has no page."""

    __slots__ = ("salt",)

    def __init__(self, salt: str) -> None:
        super().__init__(None, 0, b"")
        self.salt = salt
