"""The work list of decode: to the exact item, and against a plain builder with loops and dicts."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_kernels import split_groups
from sapwood_kernels.decode_layout import DecodeGrid, DecodeLayout
from sapwood_kernels.decode_work import DecodeLists, DecodeWork, build_decode_work
from sapwood_kernels.split_groups import IntArray
from support.decode_runs import CPU, DecodeRun
from support.mutants import Mutant, survivors
from support.scale import scaled

# Splits of 64 keys and pages of 16. Groups of 8 heads: 2 rows to a row block, 4 to a wide item.
LAYOUT = DecodeLayout(config=DecodeRun().config, arch=0, group=8, page_size=16, num_pages=1000, capacity=1000)
GRID = DecodeGrid(num_programs=4, wide_programs=2)
HIDDEN = 2**30


def table(*rows: list[int]) -> IntArray:
    """A block table; behind a row's own pages it names none."""
    width = max(map(len, rows))
    return np.array([row + [HIDDEN] * (width - len(row)) for row in rows], dtype=np.int32)


def lengths(*num_keys: int) -> IntArray:
    return np.array(num_keys, dtype=np.int32)


def check_items() -> None:
    """Six rows share split 0, three of them split 1 as well; the rest is theirs alone."""
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    tables = table(
        [*first, *second, 10],
        [*first, *second, 11, 12],
        [*first, 13],
        [*first, *second, 14],
        [*first, 15],
        [*first, 16],
        [20, 21, 22, 23],
    )
    num_keys = lengths(130, 150, 70, 129, 80, 65, 64)
    lists = build_decode_work(tables, num_keys, LAYOUT)
    assert lists.wide_items.tolist() == [[0, 4, 0, 0], [7, 3, 0, 1]]
    assert lists.items.tolist() == [
        [4, 2, 0, 0],  # what the wide item left of the six rows
        [6, 1, 6, 0],
        [10, 1, 1, 2],  # 22 keys
        [11, 1, 4, 1],  # 16
        [12, 1, 2, 1],  # 6
        [13, 1, 0, 2],  # 2
        [14, 1, 5, 1],  # 1
        [15, 1, 3, 2],  # 1
    ]
    assert lists.rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 3, 1, 4, 2, 0, 5, 3]
    assert lists.first_partial.tolist() == [0, 3, 6, 8, 11, 13, 15]
    assert lists.counts.tolist() == [8, 2]


def plain_lists(tables: IntArray, num_keys: IntArray, layout: DecodeLayout, group: bool, wide: bool) -> DecodeLists:
    """What `build_decode_work` says it does, one row and one split at a time."""
    size, window = layout.config.split_size, layout.window
    groups: dict[tuple[int, ...], list[int]] = {}
    first_partial, num_pairs = [], 0
    for row, keys in enumerate(num_keys.tolist()):
        first_key = 0 if window is None else max(keys - window, 0)
        splits = range(first_key // size, -(-keys // size))
        first_partial.append(num_pairs - splits.start)
        num_pairs += len(splits)
        for split in splits:
            begin, end = max(first_key, split * size) // layout.page_size, min(keys, (split + 1) * size)
            pages = tables[row, begin : -(-end // layout.page_size)].tolist()
            groups.setdefault((split, begin, *pages, *(() if group else (row,))), []).append(row)
    for key in [key for key, members in groups.items() if len(members) < layout.config.min_group_rows]:
        for row in groups.pop(key):
            groups[*key, -1 - row] = [row]

    def keys_of(entry: tuple[tuple[int, ...], list[int]]) -> int:
        (split, *_), rows = entry
        return max(min(int(num_keys[row]) - split * size, size) for row in rows)

    items: list[list[int]] = []
    wide_items: list[list[int]] = []
    rows: list[int] = []
    block, blocks = layout.rows_per_block, layout.config.row_blocks if wide else 1
    for (split, *_), members in sorted(groups.items(), key=lambda e: (-keys_of(e), e[0][0], e[1][0])):
        done = 0
        while done < len(members):
            left = len(members) - done
            is_wide = left > block and blocks > 1
            count = min(left, block * blocks if is_wide else block)
            (wide_items if is_wide else items).append([len(rows) + done, count, members[0], split])
            done += count
        rows += members
    return DecodeLists(
        items=np.array(items, dtype=np.int32).reshape(-1, 4),
        wide_items=np.array(wide_items, dtype=np.int32).reshape(-1, 4),
        rows=np.array(rows, dtype=np.int32),
        first_partial=np.array(first_partial, dtype=np.int32),
    )


def assert_same(found: DecodeLists, wanted: DecodeLists) -> None:
    for name in ("rows", "items", "wide_items", "first_partial", "counts"):
        array = getattr(found, name)
        assert array.dtype == np.int32
        assert array.tolist() == getattr(wanted, name).tolist(), name


def forest(generator: np.random.Generator, num_rows: int) -> tuple[IntArray, IntArray]:
    """Rows that begin as an earlier one for some pages; behind a row's own pages the table names none."""
    num_keys = generator.integers(0, 300, num_rows, dtype=np.int32)
    tables = np.full((num_rows, 20), HIDDEN, dtype=np.int32)
    unused = 1 + generator.permutation(999)[: 20 * num_rows]
    for row, keys in enumerate(num_keys):
        pages = -(-keys // 16)
        tables[row, :pages] = unused[20 * row :][:pages]
        if row:
            parent = int(generator.integers(0, row))
            shared = int(generator.integers(0, min(pages, -(-num_keys[parent] // 16)) + 1))
            tables[row, :shared] = tables[parent, :shared]
    return tables, num_keys


def check_against_plain(seed: int, num_rows: int, layout: DecodeLayout, group: bool = True, wide: bool = True) -> None:
    tables, num_keys = forest(np.random.default_rng(seed), num_rows)
    found = build_decode_work(tables, num_keys, layout, group=group, wide=wide)
    assert_same(found, plain_lists(tables, num_keys, layout, group, wide))


def test_items_are_exactly_these() -> None:
    check_items()


@settings(max_examples=scaled(2000, 100))
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(0, 40),
    heads=st.sampled_from((1, 3, 8, 16)),
    page_size=st.sampled_from((16, 32, 64)),
    window=st.sampled_from((None, None, 1, 16, 50, 64, 200)),
    row_blocks=st.sampled_from((1, 2, 4)),
    min_rows=st.sampled_from((2, 2, 3, 4, 7)),
    way=st.sampled_from(((True, True), (True, False), (False, True))),
)
def test_the_lists_are_those_of_the_plain_builder(
    seed: int,
    num_rows: int,
    heads: int,
    page_size: int,
    window: int | None,
    row_blocks: int,
    min_rows: int,
    way: tuple[bool, bool],
) -> None:
    config = replace(DecodeRun(row_blocks=row_blocks).config, min_group_rows=min_rows)
    layout = replace(LAYOUT, config=config, group=heads, page_size=page_size, window=window)
    check_against_plain(seed, num_rows, layout, *way)


def test_a_collision_of_hashes_groups_nothing_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a base of 0 every page of every split has the same hash."""
    monkeypatch.setattr(split_groups, "_HASH_BASE", 0)
    tables = table([1, 2], [3, 4], [5, 6])
    lists = build_decode_work(tables, lengths(32, 32, 32), LAYOUT)
    assert lists.items.tolist() == [[0, 1, 0, 0], [1, 1, 1, 0], [2, 1, 2, 0]]


def check_splits_stay_apart() -> None:
    """The same pages in another place of a table are other keys: they have other positions."""
    again = [1, 2, 3, 4]
    lists = build_decode_work(table(again + again, again), lengths(128, 64), LAYOUT)
    assert lists.items.tolist() == [[0, 1, 0, 0], [1, 1, 1, 0], [2, 1, 0, 1]]
    assert lists.rows.tolist() == [0, 1, 0]


def test_equal_pages_of_other_splits_make_no_group() -> None:
    check_splits_stay_apart()


def test_a_group_of_one_is_a_row_alone() -> None:
    """Nothing is shared, or all that was shared has ended: the lists are those without groups."""
    tables = table([1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12])
    num_keys = lengths(80, 20, 70)
    assert_same(build_decode_work(tables, num_keys, LAYOUT), build_decode_work(tables, num_keys, LAYOUT, group=False))


def test_no_rows_and_rows_of_padding() -> None:
    for tables, num_keys in ((np.zeros((0, 4), np.int32), lengths()), (table([HIDDEN], [HIDDEN]), lengths(0, 0))):
        lists = build_decode_work(tables, num_keys, LAYOUT)
        assert (len(lists.items), len(lists.wide_items), len(lists.rows)) == (0, 0, 0)
        assert lists.counts.tolist() == [0, 0]
        assert lists.first_partial.tolist() == [0] * len(num_keys)


def test_a_table_wider_than_its_rows_is_the_same() -> None:
    tables, num_keys = forest(np.random.default_rng(5), 9)
    wider = np.pad(tables, ((0, 0), (0, 45)), constant_values=HIDDEN)
    assert_same(build_decode_work(wider, num_keys, LAYOUT), build_decode_work(tables, num_keys, LAYOUT))


@pytest.mark.parametrize(
    ("tables", "num_keys", "layout", "message"),
    [
        (table([1, 2], [3, 0]), lengths(32, 17), LAYOUT, "holds page 0 in row 1, column 1; accepted: 1 to 999"),
        (table([1, -7]), lengths(32), LAYOUT, "block_tables holds page -7 in row 0, column 1"),
        (table([1] * 5 + [1000]), lengths(96), LAYOUT, "block_tables holds page 1000 in row 0, column 5"),
        (table([1, 2]), lengths(33), LAYOUT, "num_keys is 33 in row 0; accepted: 0 to 32"),
        (table([1, 2]), lengths(-1), LAYOUT, "num_keys is -1 in row 0"),
        (table([1, 2]), lengths(1, 1), LAYOUT, r"num_keys is int32 \[2\]; accepted: int32 \[1\]"),
        (table([1]).astype(np.int64), lengths(1), LAYOUT, r"block_tables is int64 \[1, 1\]; accepted: int32"),
        (table([1]), np.array([1]), LAYOUT, r"num_keys is int64 \[1\]; accepted: int32"),
        (
            table([1] * 5, [6]),
            lengths(65, 1),
            replace(LAYOUT, capacity=2),
            "3 splits in all; accepted: up to capacity, 2",
        ),
    ],
)
def test_bad_tables_are_refused(tables: IntArray, num_keys: IntArray, layout: DecodeLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_decode_work(tables, num_keys, layout)


def test_pages_that_no_row_reads_may_be_anything() -> None:
    windowed = replace(LAYOUT, window=20)
    tables = table([-1, HIDDEN, 0, 4, 5])
    lists = build_decode_work(tables, lengths(70), windowed)
    assert lists.items.tolist() == [[0, 1, 0, 0], [1, 1, 0, 1]]
    with pytest.raises(ValueError, match="holds page 0 in row 0, column 2"):
        build_decode_work(tables, lengths(70), replace(LAYOUT, window=30))


def test_a_step_is_loaded_over_the_last_one() -> None:
    work = DecodeWork.allocate(LAYOUT, 7, GRID, CPU)
    assert work.counts.tolist() == [0, 0]
    for seed in (1, 2):
        tables, num_keys = forest(np.random.default_rng(seed), 7)
        lists = build_decode_work(tables, num_keys, LAYOUT)
        work.load(lists)
        assert work.wide_items is not None
        assert work.items[: len(lists.items)].tolist() == lists.items.tolist()
        assert work.wide_items[: len(lists.wide_items)].tolist() == lists.wide_items.tolist()
        assert work.rows[: len(lists.rows)].tolist() == lists.rows.tolist()
        assert work.first_partial.tolist() == lists.first_partial.tolist()
        assert work.counts.tolist() == lists.counts.tolist()


def test_the_caller_may_copy() -> None:
    copied: list[tuple[torch.Tensor, IntArray]] = []
    work = DecodeWork.allocate(LAYOUT, 7, GRID, CPU)
    tables, num_keys = forest(np.random.default_rng(1), 7)
    work.load(build_decode_work(tables, num_keys, LAYOUT), lambda buffer, array: copied.append((buffer, array)))
    assert work.counts.tolist() == [0, 0]
    assert copied[-1][0] is work.counts
    assert {id(buffer) for buffer, _ in copied} >= {id(work.items), id(work.rows), id(work.first_partial)}


def test_buffers_too_small_are_refused_before_any_is_written() -> None:
    tables, num_keys = forest(np.random.default_rng(1), 7)
    lists = build_decode_work(tables, num_keys, LAYOUT)
    work = DecodeWork.allocate(LAYOUT, 6, GRID, CPU)
    with pytest.raises(ValueError, match="first_partial has 7 entries; accepted: up to 6"):
        work.load(lists)
    assert not work.items.any()
    narrow = DecodeWork.allocate(LAYOUT, 7, GRID, CPU, wide=False)
    assert narrow.wide_items is None
    with pytest.raises(ValueError, match=r"there are \d+ wide items; accepted: none"):
        narrow.load(lists)
    narrow.load(build_decode_work(tables, num_keys, LAYOUT, wide=False))
    one_block = replace(LAYOUT, config=DecodeRun(row_blocks=1).config)
    assert DecodeWork.allocate(one_block, 7, GRID, CPU).wide_items is None


def checks(module: ModuleType) -> None:
    """What the mutants must not get past. (The module is broken wherever it is imported.)"""
    check_items()
    check_splits_stay_apart()
    for seed in range(12):
        check_against_plain(seed, 3 * seed, replace(LAYOUT, window=(None, 50, 64)[seed % 3], group=(8, 3)[seed % 2]))
        check_against_plain(seed, 20, LAYOUT, wide=False)
        check_against_plain(seed, 20, LAYOUT, group=False)
        check_against_plain(seed, 20, replace(LAYOUT, config=DecodeRun(row_blocks=4).config))
        check_against_plain(seed, 20, replace(LAYOUT, config=replace(LAYOUT.config, min_group_rows=4)))


WORK, GROUPS = "sapwood_kernels.decode_work", "sapwood_kernels.split_groups"
MUTANTS = [
    Mutant(WORK, "-keys))", "keys))"),
    Mutant(WORK, "splits.split[first], -keys", "-keys"),
    Mutant(WORK, "% wide_size > size)", "% wide_size >= size)"),
    Mutant(WORK, "offset = skipped[run] + piece * size", "offset = piece * size"),
    Mutant(WORK, "np.minimum(num_wide * wide_size, runs.num_rows)", "num_wide * wide_size"),
    Mutant(WORK, "runs.row_start[run] + offset", "runs.start[run] + offset"),
    Mutant(WORK, "np.repeat(runs.start - runs.row_start,", "np.repeat(runs.start,"),
    Mutant(WORK, "np.maximum.reduceat(splits.keys[order], starts)", "splits.keys[order][starts]"),
    Mutant(GROUPS, "np.maximum(keys - window, 0) // split_size", "np.maximum(keys - window - 1, 0) // split_size"),
    Mutant(GROUPS, "counts = -(-keys // split_size) - first_split", "counts = keys // split_size - first_split"),
    Mutant(GROUPS, "np.cumsum(counts) - counts - first_split", "np.cumsum(counts) - counts"),
    Mutant(GROUPS, "np.arange(size) >= (first_page", "np.arange(size) > (first_page"),
    Mutant(GROUPS, "pages = np.where(seen,", "pages = np.where(seen | True,"),
    Mutant(GROUPS, "same[alike] = (pages[order[alike + 1]] == pages[order[alike]]).all(axis=1)", "same[alike] = False"),
    Mutant(GROUPS, "counts < min_rows", "counts <= min_rows"),
    Mutant(GROUPS, "same = (splits.split[order[1:]] == splits.split[order[:-1]]) &", "same ="),
]  # fmt: skip


def test_the_checks_notice_a_broken_builder() -> None:
    chosen = MUTANTS[:: len(MUTANTS) // scaled(len(MUTANTS), 4)]
    assert survivors(chosen, checks) == []
