"""Exact page ids through small scenes. Pages hold 4 tokens; ids are handed out from 1, the last freed first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sapwood_server.cache.integrity import IntegrityError
from sapwood_server.cache.manager import KVCacheManager
from sapwood_server.cache.table import BlockTable
from sapwood_server.values.plan import PageCopy
from support.cache_scene import Scene


def test_full_pages_are_shared_and_a_partial_one_is_copied() -> None:
    scene = Scene(8)
    first = scene.start([1, 2, 3, 4, 5, 6, 7])
    assert first.pages == [1, 2]
    second = scene.admit([1, 2, 3, 4, 5, 6, 8])
    assert second.table.pages == [1, 3]
    assert second.copy == PageCopy(2, 3, 2)
    assert second.table.num_written == 6
    assert scene.counts == (5, 0, 3)


def test_the_last_token_is_always_left_to_compute() -> None:
    scene = Scene(8)
    scene.run([1, 2, 3, 4, 5, 6, 7, 8])
    admission = scene.admit([1, 2, 3, 4, 5, 6, 7, 8])
    assert admission.table.num_written == 7
    assert admission.copy == PageCopy(2, 3, 3)


def test_the_next_turn_reuses_every_token_and_frees_the_page_it_outgrew() -> None:
    scene = Scene(8)
    scene.run([1, 2, 3, 4, 5, 6])
    assert scene.counts == (6, 2, 0)
    turn = scene.admit([1, 2, 3, 4, 5, 6, 7])
    assert turn.copy == PageCopy(2, 3, 2)
    assert scene.counts == (5, 0, 3), "the source is held until the step ends"
    scene.compute(turn.table, 7)
    assert scene.counts == (6, 0, 2), "page 2 is a prefix of page 3 now, and free"
    scene.end(turn.table)
    assert scene.counts == (6, 2, 0)
    assert scene.resident([1, 2, 3, 4, 5, 6, 7]) == 7


def test_a_partial_page_that_ends_as_a_prefix_of_another_is_freed() -> None:
    scene = Scene(8)
    short = scene.start([1, 2])
    long = scene.start([1, 2, 3])
    scene.end(short)
    assert scene.counts == (7, 0, 1)
    scene.end(long)
    assert scene.counts == (7, 1, 0)
    assert scene.resident([1, 2, 3]) == 3


def test_equal_partial_pages_are_kept_once() -> None:
    scene = Scene(8)
    tables = [scene.admit([1, 2, 3]).table for _ in range(3)]
    for table in tables:
        scene.compute(table, 3)
    for table in tables:
        scene.end(table)
    assert scene.counts == (7, 1, 0)


def test_the_first_to_fill_a_page_wins_and_the_other_stays_private() -> None:
    scene = Scene(8)
    first = scene.admit([1, 2, 3, 4, 5]).table
    second = scene.admit([1, 2, 3, 4, 5]).table  # nothing is written yet: both compute everything
    scene.compute(first, 5)
    scene.compute(second, 5)
    assert (first.pages, second.pages) == ([1, 2], [3, 4])
    assert (first.private, second.private) == ([], [3])
    assert scene.match([1, 2, 3, 4]).num_pages == 1
    scene.end(first)
    assert scene.counts == (5, 0, 3), "page 1 is held by the second, page 2 was a prefix of its page 4"
    scene.end(second)
    assert scene.counts == (6, 2, 0), "page 3 is free, page 4 stays below page 1"
    assert scene.resident([1, 2, 3, 4, 5]) == 5


def test_decodes_that_fill_the_same_page_leave_one() -> None:
    scene = Scene(8)
    first = scene.start([1, 2, 3])
    second = scene.start([1, 2, 3])
    assert (first.pages, second.pages) == ([1], [2])
    scene.grow(first, 4, 5)
    scene.grow(second, 4, 6)
    assert (second.pages, second.private) == ([2, 4], [2])
    assert scene.match([1, 2, 3, 4, 6]).num_tokens == 5
    scene.end(first)
    scene.end(second)
    assert scene.counts == (5, 3, 0)


def test_evicts_leaves_first_and_the_least_recently_used_chain_first() -> None:
    scene = Scene(6)
    scene.run([1, 1, 1, 1, 2, 2, 2, 2, 3])  # pages 1 2 3
    scene.run([7, 7, 7, 7, 8])  # pages 4 5
    scene.run([1, 1, 1, 1, 9])  # page 1, and 6 for the 9
    assert scene.counts == (0, 6, 0)
    table = scene.admit([5, 5, 5, 5, 5, 5, 5, 5]).table
    assert scene.cache.extend(table, 4) == [3], "the tail of what was let go first"
    assert scene.cache.extend(table, 8) == [2], "then its parent; page 1 is younger, and no leaf"
    assert scene.resident([1, 1, 1, 1, 2, 2, 2, 2, 3]) == 4
    assert scene.resident([7, 7, 7, 7, 8]) == 5
    assert scene.resident([1, 1, 1, 1, 9]) == 5


def test_what_runs_is_never_evicted() -> None:
    scene = Scene(4)
    running = scene.start([1, 2, 3, 4, 5])
    scene.run([7, 8])
    assert scene.cache.num_available == 2
    other = scene.admit([9, 9, 9, 9, 9, 9, 9, 9]).table
    assert scene.cache.extend(other, 8) == [4, 3]
    with pytest.raises(ValueError, match="1 pages asked for, 0 available"):
        scene.cache.extend(other, 9)
    assert scene.resident([1, 2, 3, 4, 5]) == 5
    assert running.pages == [1, 2]


def test_a_source_is_not_evicted_for_its_own_copy() -> None:
    scene = Scene(3)
    scene.run([1, 2, 3])  # page 1
    scene.run([1, 9])  # page 2
    busy = scene.start([7])  # page 3
    admission = scene.admit([1, 2, 3, 4])
    assert admission.copy == PageCopy(1, 2, 3), "page 2 is evicted although page 1 was let go before it"
    assert scene.counts == (0, 0, 3)
    scene.compute(admission.table, 4)
    scene.end(busy)


def test_without_room_for_a_copy_the_source_is_taken_over() -> None:
    scene = Scene(2)
    busy = scene.start([7])  # page 1
    scene.run([1, 2, 3])  # page 2
    admission = scene.admit([1, 2, 9, 9])
    assert admission.copy is None
    assert admission.table.pages == [2]
    assert admission.table.num_written == 2
    assert scene.resident([1, 2, 3]) == 2, "truncated"
    scene.compute(admission.table, 4)
    assert scene.resident([1, 2, 9, 9]) == 4
    scene.end(busy)


def test_a_source_in_use_is_not_taken_over() -> None:
    scene = Scene(1)
    scene.start([1, 2, 3])
    match = scene.match([1, 2, 9])
    assert not scene.cache.has_room(match, 1)


def test_a_descendant_is_evicted_before_its_ancestor_is_taken_over() -> None:
    scene = Scene(2)
    scene.run([1, 2, 3, 4, 5])  # pages 1 2
    admission = scene.admit([1, 2, 3, 9])
    assert admission.copy == PageCopy(1, 2, 3)
    assert scene.resident([1, 2, 3, 4, 5]) == 4


def test_room_counts_what_a_match_would_hold() -> None:
    scene = Scene(4)
    scene.run([1, 2, 3, 4, 5, 6, 7, 8, 9])  # 3 pages cached, 1 free
    match = scene.match([1, 2, 3, 4, 5, 6, 7, 8, 0])
    assert match.num_pages == 2
    assert scene.cache.has_room(match, 2), "the free page, and page 3"
    assert not scene.cache.has_room(match, 3)


def test_without_prefix_cache_nothing_matches_and_nothing_stays() -> None:
    scene = Scene(4, prefix_cache=False)
    table = scene.start([1, 2, 3, 4, 5])
    assert scene.resident([1, 2, 3, 4, 5]) == 0
    scene.end(table)
    assert scene.counts == (4, 0, 0)


def test_what_a_distrusted_sequence_read_and_wrote_leaves_the_tree_with_all_that_follows() -> None:
    scene = Scene(32)
    scene.run([1] * 12)
    scene.run([1] * 8 + [2] * 5)
    table = scene.start([1] * 8 + [3])
    scene.grow(table, 3, 3, 3, 3)
    scene.run([5] * 4)
    scene.fail(table, table.num_tokens)
    assert scene.counts == (31, 1, 0)
    assert [scene.resident([token] * 4) for token in (1, 5)] == [0, 4]


def test_what_others_use_stays_until_they_are_distrusted_too() -> None:
    scene = Scene(16)
    scene.run([1] * 8)
    user = scene.start([1] * 4 + [2])
    scene.fail(scene.admit([1] * 8 + [3]).table, 9)
    assert scene.counts == (14, 0, 2)
    assert scene.resident([1] * 8) == 4
    user.append(2)
    scene.fail(user, 6)
    assert scene.counts == (16, 0, 0)


def test_a_page_whose_copy_is_distrusted_leaves_the_tree_unless_it_is_used() -> None:
    scene = Scene(16)
    scene.run([1, 2, 3])
    scene.fail(scene.admit([1, 2, 4]).table, 3)
    assert scene.counts == (16, 0, 0)
    user = scene.start([1, 2, 3])
    scene.fail(scene.admit([1, 2, 4]).table, 3)
    assert scene.counts == (15, 0, 1)
    scene.end(user)
    assert scene.resident([1, 2, 3]) == 3


def test_a_distrusted_chain_may_be_long() -> None:
    scene = Scene(3000, page_size=1)
    scene.fail(scene.start([1] * 2999), 2999)
    assert scene.counts == (3000, 0, 0)


def test_without_prefix_cache_a_distrusted_sequence_is_as_any_other() -> None:
    scene = Scene(8, prefix_cache=False)
    scene.fail(scene.start([1] * 8), 8)
    assert scene.counts == (8, 0, 0)


def test_clear_forgets_everything() -> None:
    scene = Scene(4)
    scene.run([1, 2, 3, 4, 5])
    scene.start([1, 2, 3, 4, 6])
    scene.cache.clear()
    scene.cache.check()
    assert scene.counts == (4, 0, 0)
    assert scene.resident([1, 2, 3, 4]) == 0


def test_refuses_a_page_size_of_nothing() -> None:
    with pytest.raises(ValueError, match="page_size is 0; accepted: at least 1"):
        KVCacheManager(4, 0)


def _break_uses(table: BlockTable, cache: KVCacheManager) -> None:
    assert table.node is not None
    table.node.uses += 1


def _break_active(table: BlockTable, cache: KVCacheManager) -> None:
    cache.tree.num_active -= 1


def _break_count(table: BlockTable, cache: KVCacheManager) -> None:
    cache.tree.num_pages += 1


def _break_pages(table: BlockTable, cache: KVCacheManager) -> None:
    table.pages.append(table.pages[0])


def _break_free(table: BlockTable, cache: KVCacheManager) -> None:
    cache.pool.give_back(table.pages[0])


def _break_leak(table: BlockTable, cache: KVCacheManager) -> None:
    cache.pool.take()


def _break_tokens(table: BlockTable, cache: KVCacheManager) -> None:
    table.data[0] ^= 1


def _break_sorting(table: BlockTable, cache: KVCacheManager) -> None:
    cache.tree.root("").keys.reverse()


def _break_private(table: BlockTable, cache: KVCacheManager) -> None:
    table.pages[0] = table.pages[1]


def _break_heap(table: BlockTable, cache: KVCacheManager) -> None:
    cache.tree._eviction._heap.clear()


def _break_depth(table: BlockTable, cache: KVCacheManager) -> None:
    assert table.node is not None
    table.node.depth += 1


def _break_kind(table: BlockTable, cache: KVCacheManager) -> None:
    assert table.node is not None
    table.node.is_open = False


def _break_written(table: BlockTable, cache: KVCacheManager) -> None:
    table.num_written += 1


@pytest.mark.parametrize(
    "damage",
    [
        _break_uses,
        _break_active,
        _break_count,
        _break_pages,
        _break_free,
        _break_leak,
        _break_tokens,
        _break_sorting,
        _break_private,
        _break_heap,
        _break_depth,
        _break_kind,
        _break_written,
    ],
)
def test_check_sees_each_kind_of_damage(damage: Callable[[BlockTable, KVCacheManager], None]) -> None:
    scene = Scene(8)
    scene.run([9, 9, 9])
    table = scene.start([1, 2, 3, 4, 5])
    damage(table, scene.cache)
    with pytest.raises(IntegrityError):
        scene.cache.check()
