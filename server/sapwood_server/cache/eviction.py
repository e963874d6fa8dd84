"""Which cached page goes first when room is needed."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Protocol

from sapwood_server.cache.node import PageNode

_COMPACT_FACTOR = 4
_COMPACT_MINIMUM = 1024
"""The heap is rebuilt when it holds more than this many entries and `_COMPACT_FACTOR` times the evictable leaves it
had at the last rebuild: each entry then pays for at most one rebuild, and stale ones can't pile up."""


class EvictionPolicy(Protocol):
    """Orders the evictable leaves of the tree."""

    def sort_key(self, node: PageNode) -> tuple[float, ...]:
        """The leaf with the smallest key is evicted first. A key may change while the node waits."""


class LeafLRU:
    """Least recently used leaf first. The pages of one sequence are let go in one tick, so its chain goes from the
    tail upwards before a page of the next sequence is touched."""

    def sort_key(self, node: PageNode) -> tuple[float, ...]:
        return (node.last_used,)


class EvictionQueue:
    """The evictable leaves in the policy's order, as a heap whose entries are validated when they come up.

    Every node is pushed when it becomes an evictable leaf; an entry whose node has since been used, evicted or has
    another key is dropped or replaced on the way out, so that using a page costs nothing here.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], int, PageNode]] = []
        self._pushes = 0
        self._compact_at = _COMPACT_MINIMUM

    def push(self, node: PageNode) -> None:
        self._pushes += 1  # ties go to the earlier push; nodes themselves have no order
        heapq.heappush(self._heap, (self._policy.sort_key(node), self._pushes, node))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> PageNode | None:
        """The next leaf to evict, or None if there is none."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if not node.is_evictable:
                continue
            if self._policy.sort_key(node) == key:
                return node
            self.push(node)
        return None

    def missing(self, leaves: Iterable[PageNode]) -> list[PageNode]:
        """Those of `leaves` that no entry would ever bring up (for integrity checks; O(entries))."""
        known = {id(node) for _, _, node in self._heap}
        return [leaf for leaf in leaves if id(leaf) not in known]

    def _compact(self) -> None:
        alive = {id(node): node for _, _, node in self._heap if node.is_evictable}
        self._heap.clear()
        self._compact_at = max(_COMPACT_MINIMUM, _COMPACT_FACTOR * len(alive))
        for node in alive.values():
            self.push(node)
