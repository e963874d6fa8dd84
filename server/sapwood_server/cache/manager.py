"""What the scheduler asks of the cache: match, admit, extend, publish, release."""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_server.cache.audit import check_cache
from sapwood_server.cache.eviction import EvictionPolicy, LeafLRU
from sapwood_server.cache.node import PageNode
from sapwood_server.cache.pool import PagePool
from sapwood_server.cache.table import BlockTable
from sapwood_server.cache.tokens import TOKEN_BYTES
from sapwood_server.cache.tree import Match, PrefixTree
from sapwood_server.values.plan import PageCopy


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that now holds pages."""

    table: BlockTable
    copy: PageCopy | None
    """To be run before the step's first KV write; its source stays held until `end_step`."""


class KVCacheManager:
    """Pages and prefix tree under one roof; every page is free, in the tree, or one sequence's own.

    Within a step: `match` and `admit` or `extend` while planning, then, once the runner is done, `end_step` and
    `publish`, then `release` for what ended. A page that a planned copy reads is not handed out before `end_step`.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_cache: bool = True, policy: EvictionPolicy | None = None
    ) -> None:
        """`num_pages` counts the reserved page 0. Without `prefix_cache` nothing matches and nothing stays."""
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; accepted: at least 1")
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._policy = policy or LeafLRU()
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(self.pool, page_size, self._policy)
        self._tables: set[BlockTable] = set()
        self._copy_sources: list[PageNode] = []

    @property
    def num_sequences(self) -> int:
        """Sequences that hold a block table."""
        return len(self._tables)

    # Counts, in pages

    @property
    def num_pages(self) -> int:
        """Pages there are, page 0 excluded."""
        return self.pool.num_usable

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """In the tree and used by no sequence."""
        return self.tree.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones, and cached ones by evicting them."""
        return self.pool.num_free + self.tree.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    # Planning a step

    def match(self, salt: str, tokens: bytes, limit: int, hint: PageNode | None = None) -> Match:
        """See `PrefixTree.match`."""
        if not self.prefix_cache:
            return Match(None)
        return self.tree.match(salt, tokens, limit, hint)

    def match_pages(self, salt: str, tokens: bytes, limit: int, hint: PageNode | None = None) -> PageNode | None:
        """See `PrefixTree.match_pages`; a cheaper first look, whole pages only."""
        if not self.prefix_cache:
            return None
        return self.tree.match_pages(salt, tokens, limit, hint)

    def has_room(self, match: Match, num_pages: int) -> bool:
        """Whether `num_pages` pages can be had over time while the whole pages of `match` are held."""
        spare = self.num_available - num_pages
        node = match.node
        while spare >= 0 and node is not None and node.parent is not None and not node.uses:
            spare -= 1  # available now, but not once the match is held
            node = node.parent
        return spare >= 0

    def admit(self, salt: str, tokens: bytes, match: Match) -> Admission:
        """Hold what matched, for a sequence of packed `tokens`.

        A match that ends inside a page gets a fresh page and the order to copy its first slots. If no page can be
        had but the source itself, and nothing uses the source, that page is taken over and truncated instead. Call
        only after `has_room(match, 1)`, with a match made since the tree last changed.
        """
        if not self.prefix_cache:
            return self._add(BlockTable(tokens, None, [], 0), None)
        node = match.node if match.node is not None else self.tree.root(salt)
        self.tree.hold(node)
        source = match.source
        if source is None:
            return self._add(BlockTable(tokens, node, _chain(node), match.num_tokens), None)
        if self.num_available - (not source.uses) == 0:
            node = self._take_over(node, source, match.num_copied)
            return self._add(BlockTable(tokens, node, _chain(node), match.num_tokens), None)
        self.tree.hold(source)
        self._copy_sources.append(source)
        target = self._take_page()
        table = BlockTable(tokens, node, [*_chain(node), target], match.num_tokens)
        table.num_published = match.num_tokens - match.num_copied
        table.source = source
        return self._add(table, PageCopy(source.page, target, match.num_copied))

    def room(self, table: BlockTable) -> int:
        """Tokens that could be computed next with the pages the sequence has and those that can be had."""
        return (len(table.pages) + self.num_available) * self.page_size - table.num_written

    def extend(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Give the sequence pages for `num_tokens` more tokens; returns the new page ids. Raises ValueError if `room`
        says otherwise."""
        missing = self.pages_for(table.num_written + num_tokens) - len(table.pages)
        if missing <= 0:
            return []
        if missing > self.num_available:
            raise ValueError(f"{missing} pages asked for, {self.num_available} available")
        pages = [self._take_page() for _ in range(missing)]
        table.pages += pages
        return pages

    # After a step

    def end_step(self) -> None:
        """The step's copies have run: let their sources go."""
        for source in self._copy_sources:
            self.tree.drop(source)
        self._copy_sources.clear()

    def publish(self, table: BlockTable, num_written: int) -> None:
        """The KV of positions `[0, num_written)` is in the sequence's pages; make it known to the tree.

        A page that fills with tokens that the tree has already becomes private, and the sequence goes on below the
        existing node. O(1) for a decode step.
        """
        table.num_written = num_written
        node = table.node
        if node is None or not table.is_trusted:
            return
        size = self.page_size
        published = table.num_published
        while published < num_written:
            index = published // size
            start = index * size
            published = start + size if start + size < num_written else num_written
            page = table.pages[index]
            node = self.tree.write(node, page, bytes(table.data[start * TOKEN_BYTES : published * TOKEN_BYTES]))
            if node.page != page:
                table.private.append(page)
        table.num_published = published
        table.node = node

    def distrust(self, table: BlockTable) -> None:
        """The logits of the step that has just run were not finite, so the KV behind them may be damaged.

        What the step wrote stays unknown to the tree (`publish` does nothing from now on), and `release` takes out of
        it all that the sequence read: its own pages and those it had matched, with whatever follows them. Which of them
        is damaged can't be told, as a chunk of a prompt is published before any logits are seen. A damaged page that
        stayed would fail every request that shares it; a good one that goes costs a prefill. Pages that others use stay
        for them, and go if they fail too.
        """
        table.is_trusted = False

    def release(self, table: BlockTable) -> None:
        """The sequence ended or was preempted: published pages stay as cache (but see `distrust`), its own become
        free."""
        self._tables.remove(table)
        for page in (*table.private, *table.unpublished_pages(self.page_size)):
            self.pool.give_back(page)
        if table.node is None:
            return
        self.tree.end(table.node)
        if not table.is_trusted:
            for node in (table.source, table.node):
                if node is not None:
                    self.tree.discard(node)

    def clear(self) -> None:
        """Forget everything, whoever uses it: for when the pages' contents can't be trusted any more."""
        self.pool = PagePool(self.pool.num_usable + 1)
        self.tree = PrefixTree(self.pool, self.page_size, self._policy)
        self._tables.clear()
        self._copy_sources.clear()

    def check(self) -> None:
        """Verify the whole state (O(pages)); raises IntegrityError that says what is wrong."""
        check_cache(self.pool, self.tree, self._tables, self._copy_sources, self.page_size)

    def _add(self, table: BlockTable, copy: PageCopy | None) -> Admission:
        self._tables.add(table)
        return Admission(table, copy)

    def _take_over(self, node: PageNode, source: PageNode, num_tokens: int) -> PageNode:
        """`source` cut to `num_tokens` and open, held in place of its parent `node`."""
        taken = self.tree.take_over(source, num_tokens)
        self.tree.drop(node)
        return taken

    def _take_page(self) -> int:
        page = self.pool.take()
        if page is None and self.tree.evict():
            page = self.pool.take()
        if page is None:
            raise ValueError("a page was asked for and none is available")
        return page


def _chain(node: PageNode) -> list[int]:
    """Page ids from the root's child down to `node`."""
    pages: list[int] = []
    while node.parent is not None:
        pages.append(node.page)
        node = node.parent
    pages.reverse()
    return pages
