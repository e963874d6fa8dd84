from __future__ import annotations

from sapwood_server.cache.eviction import EvictionQueue, LeafLRU
from sapwood_server.cache.manager import KVCacheManager
from sapwood_server.cache.node import PageNode, RootNode
from sapwood_server.cache.tokens import pack_tokens
from support.cache_scene import Scene


def _leaf(page: int, last_used: int) -> PageNode:
    node = PageNode(RootNode(""), page, pack_tokens([page]))
    node.last_used = last_used
    return node


class _OldestPageFirst:
    """Another policy: by page id."""

    def sort_key(self, node: PageNode) -> tuple[float, ...]:
        return (node.page,)


def test_pops_the_least_recently_used_first() -> None:
    queue = EvictionQueue(LeafLRU())
    leaves = [_leaf(1, 30), _leaf(2, 10), _leaf(3, 20)]
    for leaf in leaves:
        queue.push(leaf)
    assert [queue.pop(), queue.pop(), queue.pop(), queue.pop()] == [leaves[1], leaves[2], leaves[0], None]


def test_skips_what_is_in_use_or_gone() -> None:
    queue = EvictionQueue(LeafLRU())
    used, gone, inner, free = _leaf(1, 1), _leaf(2, 2), _leaf(3, 3), _leaf(4, 4)
    for leaf in (used, gone, inner, free):
        queue.push(leaf)
    used.uses = 1
    gone.in_tree = False
    inner.children[b"child"] = free
    assert queue.pop() is free
    assert queue.pop() is None


def test_a_leaf_used_since_is_asked_again_in_its_new_place() -> None:
    queue = EvictionQueue(LeafLRU())
    first, second = _leaf(1, 1), _leaf(2, 2)
    queue.push(first)
    queue.push(second)
    first.last_used = 3
    assert [queue.pop(), queue.pop()] == [second, first]


def test_stale_entries_do_not_pile_up() -> None:
    queue = EvictionQueue(LeafLRU())
    leaf = _leaf(1, 0)
    for tick in range(100_000):
        leaf.last_used = tick
        queue.push(leaf)
    assert len(queue._heap) < 2_000
    assert queue.pop() is leaf


def test_the_policy_decides() -> None:
    scene = Scene(8)
    scene.cache = KVCacheManager(9, 4, policy=_OldestPageFirst())
    old = scene.run([1, 1, 1, 1])
    new = scene.run([2, 2, 2, 2])
    scene.run([1, 1, 1, 1, 5])  # makes `old` the most recently used
    assert scene.cache.tree.evict()
    assert scene.resident([1, 1, 1, 1, 5]) == 5, "page 1 has a child: it is no leaf"
    assert (old, new) == ([1], [2])
    assert scene.resident([2, 2, 2, 2]) == 0
