from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_server.cache.tokens import pack_tokens
from support.cache_scene import Scene
from support.digest_kv import common_prefix
from support.scale import scaled

_IDS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@given(
    page_size=st.sampled_from([1, 2, 3, 4, 16]), written=st.lists(_IDS, max_size=12), sought=st.lists(_IDS, max_size=4)
)
@settings(max_examples=scaled(2000, 100))
def test_finds_the_longest_prefix_of_anything_written(
    page_size: int, written: list[list[int]], sought: list[list[int]]
) -> None:
    scene = Scene(200, page_size)
    running = []
    for index, ids in enumerate(written):
        table = scene.start(ids)
        if index % 3:
            scene.end(table)
        else:
            running.append(table)
    for ids in (*written, *sought):
        expected = max((common_prefix(ids, other) for other in written), default=0)
        assert scene.resident(ids) == expected
        for limit in range(len(ids) + 1):
            assert scene.cache.match("", pack_tokens(ids), limit).num_tokens == min(expected, limit)
    for table in running:
        scene.end(table)
    while scene.cache.tree.evict():
        scene.cache.check()
    assert scene.counts == (200, 0, 0)


@pytest.mark.parametrize("position", range(9))
@pytest.mark.parametrize("bit", [0, 7, 8, 16, 24, 31])
def test_a_token_that_differs_in_one_bit_ends_the_match(position: int, bit: int) -> None:
    """Field case pc-03: no lookup key that two different pages could share."""
    scene = Scene(8)
    ids = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    scene.run(ids)
    other = list(ids)
    other[position] ^= 1 << bit
    assert scene.resident(other) == position


def test_a_page_is_found_under_its_own_prefix_only() -> None:
    """Field case pc-03: a page's key is chained to its parent."""
    scene = Scene(8)
    scene.run([1, 1, 1, 1, 2, 2, 2, 2])
    assert scene.resident([2, 2, 2, 2]) == 0
    assert scene.resident([1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]) == 4


def test_salts_see_nothing_of_each_other() -> None:
    scene = Scene(8)
    scene.run([1, 2, 3, 4, 5], salt="a")
    assert scene.resident([1, 2, 3, 4, 5], salt="a") == 5
    assert scene.resident([1, 2, 3, 4, 5], salt="") == 0
    assert scene.resident([1, 2, 3, 4, 5], salt="b") == 0
    assert scene.run([1, 2, 3, 4, 5], salt="b") == [3, 4], "its own pages, not a's"


def test_a_salt_without_pages_is_forgotten() -> None:
    scene = Scene(2)
    for salt in range(100):
        scene.run([1, 2, 3, 4, 5], salt=str(salt))
    assert len(scene.cache.tree._roots) == 1


def test_resumes_a_match_at_the_nearest_page_that_is_left() -> None:
    scene = Scene(8)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    tokens = pack_tokens(ids)
    scene.run(ids[:8])
    hint = scene.cache.match("", tokens, 8).node
    assert hint is not None
    assert hint.depth == 2
    scene.run(ids)
    assert scene.cache.match("", tokens, 9, hint).num_tokens == 9, "goes on from where it was"
    for left in (8, 4, 0):
        assert scene.cache.tree.evict()
        assert scene.cache.match("", tokens, 9, hint).num_tokens == left
    scene.run(ids)
    assert scene.cache.match("", tokens, 9, hint).num_tokens == 9, "evicted and written again, in other nodes"


def test_a_page_still_being_written_is_found_up_to_its_last_token() -> None:
    scene = Scene(8)
    table = scene.start([1, 2, 3, 4, 5])
    assert scene.resident([1, 2, 3, 4, 5, 6, 7]) == 5
    scene.grow(table, 6)
    match = scene.match([1, 2, 3, 4, 5, 6, 7])
    assert (match.num_tokens, match.num_copied, match.source is not None) == (6, 2, True)
    assert match.source is not None
    assert match.source.page == table.pages[1]


def test_prefers_whole_pages_and_then_the_closest_sibling() -> None:
    scene = Scene(8)
    scene.run([1, 2, 3, 4])
    scene.run([1, 2, 9, 9])
    scene.run([1, 3, 3, 3])
    match = scene.match([1, 2, 3, 5])
    assert match.source is not None
    assert (match.source.page, match.num_copied) == (1, 3)
    match = scene.match([1, 2, 10, 0])
    assert match.source is not None
    assert (match.num_copied, match.num_pages) == (2, 0)
    assert scene.match([1, 2, 9, 9]).num_pages == 1


def test_takes_over_no_page_that_is_used() -> None:
    scene = Scene(4)
    table = scene.start([1, 2, 3])
    assert table.node is not None
    with pytest.raises(ValueError, match="page 1 is not an unused leaf"):
        scene.cache.tree.take_over(table.node, 2)
