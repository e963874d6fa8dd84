"""The prefix tree: which tokens' KV is resident, in which page."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

from sapwood_server.cache.eviction import EvictionPolicy, EvictionQueue
from sapwood_server.cache.node import PageNode, RootNode
from sapwood_server.cache.pool import PagePool
from sapwood_server.cache.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix of some tokens. Valid until the tree next changes."""

    node: PageNode | None
    """The last page that matches whole (a root if none does); None if nothing is known under the salt."""
    num_tokens: int = 0
    """Tokens that match, those inside `source` included."""
    source: PageNode | None = None
    """A page below `node` whose first `num_copied` slots match as well; to be copied."""
    num_copied: int = 0

    @property
    def num_pages(self) -> int:
        """Pages that match whole."""
        return self.node.depth if self.node is not None else 0


class PrefixTree:
    """Pages by the tokens they hold, one root per salt; a node is one page. A tree serves one model.

    A lookup goes page by page through a dict whose keys are the pages' tokens, so it costs O(tokens) and never
    O(children), and compares tokens, not hashes. Where no whole page matches, the best partial one is a neighbour of
    the sought tokens among the sorted children: the longest common prefix with any member of a sorted set is shared
    with its predecessor or its successor.

    Invariants (`cache.audit` checks them): only full pages have children; siblings differ in their tokens; an unused
    partial page is never a prefix of a sibling; every ancestor of an active node is active, so
    `num_pages - num_active` pages can be evicted, leaves first.
    """

    def __init__(self, pool: PagePool, page_size: int, policy: EvictionPolicy) -> None:
        self._pool = pool
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, RootNode] = {}
        self._eviction = EvictionQueue(policy)
        self._tick = 0
        self.num_pages = 0
        """Pages in the tree."""
        self.num_active = 0
        """Of those, pages in use, which can't be evicted."""

    # Looking up

    def match(self, salt: str, tokens: bytes, limit: int, hint: PageNode | None = None) -> Match:
        """The longest resident prefix of packed `tokens`, of at most `limit` tokens. Changes nothing.

        `hint`: the `node` of an earlier match of the same tokens with no larger limit; the walk resumes there, or at
        its nearest ancestor that is still in the tree.
        """
        node = self.match_pages(salt, tokens, limit, hint)
        if node is None:
            return Match(None)
        start = node.depth * self._page_size
        stop = min(limit, start + self._page_size)
        source, num_copied = None, 0
        if stop > start and (node.keys or node.open_pages):
            source, num_copied = node.closest_child(tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES])
        return Match(node, start + num_copied, source, num_copied)

    def match_pages(self, salt: str, tokens: bytes, limit: int, hint: PageNode | None = None) -> PageNode | None:
        """The last node on the path of whole matching pages, within `limit` tokens; None for an unknown salt."""
        node = hint
        while node is not None and not node.in_tree:
            node = node.parent
        if node is None:
            node = self._roots.get(salt)
            if node is None:
                return None
        width = self._page_bytes
        position = node.depth * width
        last = limit * TOKEN_BYTES - width
        while position <= last:
            child = node.children.get(tokens[position : position + width])
            if child is None:
                break
            node = child
            position += width
        return node

    # Using

    def root(self, salt: str) -> RootNode:
        """The root of `salt`, made if need be. It lasts while it has pages or is in use."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = RootNode(salt)
        return root

    def hold(self, node: PageNode) -> None:
        """Use `node` once more: it and its ancestors stay until the matching `drop`. O(1) if already active."""
        while True:
            node.uses += 1
            if node.uses > 1 or node.parent is None:
                return
            self.num_active += 1
            node = node.parent

    def drop(self, node: PageNode) -> None:
        """Undo one `hold`. What nothing uses any more becomes evictable, as used just now."""
        self._tick += 1
        released = node
        while True:
            node.uses -= 1
            if node.uses or node.parent is None:
                break
            self.num_active -= 1
            node.last_used = self._tick
            node = node.parent
        if released.uses or not released.in_tree:
            return
        if released.num_tokens < self._page_size and released.is_covered:
            self._remove(released)
        else:
            self._settle(released)

    # Writing

    def write(self, node: PageNode, page: int, key: bytes) -> PageNode:
        """Publish that `page` now holds the tokens `key`, at the end of the chain that `node` ends.

        `node` is a held full page or root, of which `page` becomes a child, or the held open node of `page` itself,
        whose tokens `key` extends. Returns the node that ends the chain from now on; the hold has moved to it. If the
        page is full and its tokens are in the tree already, that is the existing node and `page` has left the tree:
        the first one written wins, the caller keeps its own page private.
        """
        is_full = len(key) == self._page_bytes
        parent = node.parent if node.is_open and node.parent is not None else node
        if node.is_open and not is_full and not parent.keys:
            node.key = key
            return node
        existing = parent.children.get(key) if is_full else None
        if existing is not None:
            self.hold(existing)
            if node.is_open:
                node.uses = 0
                self.num_active -= 1
                parent.uses -= 1  # stays above 0: `existing` uses it
                self._unlink(node)
            else:
                self.drop(node)
            return existing
        if node.is_open:
            node.key = key
        else:
            node = self._open(parent, page, key)
            self.drop(parent)
        if parent.keys:
            self._remove_covered_by(parent, key)
        if is_full:
            self._close(node)
        return node

    def end(self, node: PageNode) -> None:
        """Undo the hold of a sequence that ends at `node`; an open page stays as a partial one, or is freed if a
        sibling holds its tokens and more."""
        if node.is_open:
            self._close(node)
        self.drop(node)

    def discard(self, node: PageNode) -> None:
        """Free `node`, its ancestors up to the first that something uses, and all that hangs below the freed ones."""
        top = None
        while node.parent is not None and not node.uses:
            if node.in_tree:
                top = node
            node = node.parent
        if top is None:
            return
        pages = [top]
        for page in pages:
            pages.extend(page.children.values())
        for page in reversed(pages):  # children before their parents
            self._remove(page)

    def take_over(self, source: PageNode, num_tokens: int) -> PageNode:
        """Truncate an unused leaf to its first `num_tokens` tokens and hand it to a sequence, as its held open page."""
        parent = source.parent
        if parent is None or not source.is_evictable:
            raise ValueError(f"page {source.page} is not an unused leaf")
        self._unlink(source)
        return self._open(parent, source.page, source.key[: num_tokens * TOKEN_BYTES])

    # Making room

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_active

    def evict(self) -> bool:
        """Free the page of the leaf that the policy names; False if nothing can be evicted."""
        leaf = self._eviction.pop()
        if leaf is None:
            return False
        self._remove(leaf)
        return True

    def nodes(self) -> Iterator[PageNode]:
        """Every node, roots included, parents before their children."""
        stack: list[PageNode] = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
            stack.extend(node.open_pages)

    def unqueued(self, leaves: list[PageNode]) -> list[PageNode]:
        """Those of `leaves` that eviction would never find (for integrity checks)."""
        return self._eviction.missing(leaves)

    # Links

    def _open(self, parent: PageNode, page: int, key: bytes) -> PageNode:
        node = PageNode(parent, page, key)
        node.is_open = True
        parent.open_pages.append(node)
        self.num_pages += 1
        self.hold(node)
        return node

    def _close(self, node: PageNode) -> None:
        """Move an open page among its parent's sorted children."""
        parent = node.parent
        if parent is None or node.key in parent.children:
            raise ValueError(f"page {node.page} can't be closed under these tokens")
        parent.open_pages.remove(node)
        node.is_open = False
        parent.children[node.key] = node
        insort(parent.keys, node.key)

    def _remove(self, node: PageNode) -> None:
        """Take an unused leaf out of the tree and free its page."""
        self._unlink(node)
        self._pool.give_back(node.page)

    def _unlink(self, node: PageNode) -> None:
        parent = node.parent
        if parent is None or node.uses or node.children or node.open_pages:
            raise ValueError(f"page {node.page} is not an unused leaf")
        if node.is_open:
            parent.open_pages.remove(node)
        else:
            del parent.children[node.key]
            del parent.keys[bisect_left(parent.keys, node.key)]
        node.in_tree = False
        self.num_pages -= 1
        self._settle(parent)

    def _settle(self, node: PageNode) -> None:
        """Note that `node` may have become an evictable leaf, or an empty root."""
        if node.uses or node.children:
            return
        if isinstance(node, RootNode):
            node.in_tree = False
            del self._roots[node.salt]
        else:
            self._eviction.push(node)

    def _remove_covered_by(self, parent: PageNode, key: bytes) -> None:
        """Free the unused partial child of `parent` whose tokens are a prefix of `key`; there is one at most, and it is
        the predecessor of `key`: whatever sorts between a prefix and its extension starts with that prefix."""
        index = bisect_right(parent.keys, key) - 1
        if index < 0 or not key.startswith(parent.keys[index]):
            return
        child = parent.children[parent.keys[index]]
        if not child.uses and len(child.key) < self._page_bytes:
            self._remove(child)
