"""One page of the prefix tree."""

from __future__ import annotations

from bisect import bisect_left

from sapwood_server.cache.tokens import TOKEN_BYTES, common_tokens


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

    @property
    def is_covered(self) -> bool:
        """Whether a sibling holds all tokens of this partial or open page."""
        parent = self.parent
        if parent is None:
            return False
        index = bisect_left(parent.keys, self.key)
        if parent.children.get(self.key) is self:
            index += 1
        if index < len(parent.keys) and parent.keys[index].startswith(self.key):
            return True
        return any(page.key.startswith(self.key) for page in parent.open_pages if page is not self)

    def closest_child(self, tokens: bytes) -> tuple[PageNode | None, int]:
        """The page below this one that shares the most leading tokens with `tokens`, and how many; a closed one on a
        tie."""
        best, best_tokens = None, 0
        index = bisect_left(self.keys, tokens)
        for key in self.keys[max(index - 1, 0) : index + 1]:
            shared = common_tokens(key, tokens)
            if shared > best_tokens:
                best, best_tokens = self.children[key], shared
        for page in self.open_pages:
            shared = common_tokens(page.key, tokens)
            if shared > best_tokens:
                best, best_tokens = page, shared
        return best, best_tokens


class RootNode(PageNode):
    """Where the prefixes of one salt begin. It has no page."""

    __slots__ = ("salt",)

    def __init__(self, salt: str) -> None:
        super().__init__(None, 0, b"")
        self.salt = salt
