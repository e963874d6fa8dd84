"""Which keys each program of decode attention reads, and for whom: planned on the host, once a step for all layers.

An item is one split of keys and the rows that attend to it. Splits have a fixed size and start at its multiples, so a
partial has the same bits whoever computes it. Rows whose pages of a split are the same share an item, and its keys are
read once; that is decided split by split, so several groups, and groups within groups, come about by themselves.

When grouping pays: from `min_group_rows` of the config on, which is 2. A row leaves one partial a split and head
whether grouped or not, so a group of n rows spares the reading of `(n - 1) * keys * 2 * head_dim` elements and writes
nothing more. Up to `rows_per_block` rows also cost a program no step more than one, since the matrix unit has room for
them anyway. What it costs is programs: fewer are left to fill the device with, which matters only where those of one
split a row would not fill it either. A guess still to be measured.

Rows beyond one row block make a *wide* item, which carries several row blocks over one loaded tile: wherever at least
two would have work. What is left of a group, one row block or less, is an ordinary item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.attention_check import check_device
from sapwood_kernels.check import check_dtype, check_shape
from sapwood_kernels.decode_layout import DecodeGrid, DecodeLayout
from sapwood_kernels.split_groups import (
    IntArray,
    LongArray,
    RowSplits,
    SplitGroups,
    group_splits,
    lone_splits,
    row_splits,
    visible_pages,
)
from sapwood_kernels.values import AttentionRule, PagedBatch


@dataclass(frozen=True, kw_only=True)
class DecodeLists:
    """One step's work, as long as it is. An item is `(row_start, n_rows, table_row, split)`: the rows are
    `rows[row_start : row_start + n_rows]`, and `table_row` is the one whose block table is read.

    The item with most keys comes first; of equal ones, the lower split, then the lower `table_row`, then the lower
    rows. The rows of a group ascend and `table_row` is its first. Both lists have that order.
    """

    items: IntArray
    """[num_items, 4], of up to `rows_per_block` rows."""
    wide_items: IntArray
    """[num_wide_items, 4], of up to `row_blocks * rows_per_block` rows."""
    rows: IntArray
    """[num_partials]."""
    first_partial: IntArray
    """[num_rows]: the number of a row's partial of split 0. Negative where a window hides the first splits."""

    @property
    def counts(self) -> IntArray:
        """[2]: of items, then of wide items."""
        return np.array([len(self.items), len(self.wide_items)], dtype=np.int32)


def copy_to_front(buffer: Tensor, array: IntArray) -> None:
    """Copies an array over the first entries of a buffer. From a GPU's point of view it waits."""
    buffer[: len(array)].copy_(torch.from_numpy(array))


@dataclass(frozen=True, kw_only=True)
class DecodeWork:
    """A step's lists on the device, in buffers of fixed size, so that a CUDA graph can hold them. What lies behind the
    counts is never read."""

    items: Tensor
    """int32 [capacity, 4]."""
    wide_items: Tensor | None
    """int32 [capacity, 4]; None: no program for wide items is started."""
    rows: Tensor
    """int32 [capacity]."""
    counts: Tensor
    """int32 [2]: of items, then of wide items."""
    first_partial: Tensor
    """int32 [max_rows]."""
    layout: DecodeLayout
    grid: DecodeGrid

    @classmethod
    def allocate(
        cls, layout: DecodeLayout, max_rows: int, grid: DecodeGrid, device: torch.device, wide: bool = True
    ) -> DecodeWork:
        """Room for what `layout` allows, and no work in it. Without `wide`, or if the config has one row block, there
        is no room for wide items."""

        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            items=buffer(layout.capacity, 4),
            wide_items=buffer(layout.capacity, 4) if wide and layout.config.row_blocks > 1 else None,
            rows=buffer(layout.capacity),
            counts=buffer(2),
            first_partial=buffer(max_rows),
            layout=layout,
            grid=grid,
        )

    def load(self, lists: DecodeLists, copy: Callable[[Tensor, IntArray], object] = copy_to_front) -> None:
        """Puts a step's lists into the buffers, by `copy(buffer, array)`. Raises ValueError for more than they hold."""
        arrays = {"items": lists.items, "rows": lists.rows, "first_partial": lists.first_partial}
        if self.wide_items is not None:
            arrays["wide_items"] = lists.wide_items
        elif len(lists.wide_items):
            raise ValueError(f"there are {len(lists.wide_items)} wide items; accepted: none, without a buffer for them")
        for name, array in arrays.items():
            room = getattr(self, name).shape[0]
            if len(array) > room:
                raise ValueError(f"{name} has {len(array)} entries; accepted: up to {room}, the buffer's")
        for name, array in arrays.items():
            if len(array):
                copy(getattr(self, name), array)
        copy(self.counts, lists.counts)


def build_decode_work(
    block_tables: IntArray, num_keys: IntArray, layout: DecodeLayout, *, group: bool = True, wide: bool = True
) -> DecodeLists:
    """A step's lists.

    block_tables int32 [num_rows, max_pages]; num_keys int32 [num_rows], this step's token included, 0 for a row of
    padding. `group=False` gives every row items of its own; `wide=False` gives a large group several items side by
    side. Raises ValueError for a row whose keys don't fit its table, a page that isn't in the pool or is page 0, and
    for more partials than the layout's capacity.
    """
    _check_arrays(block_tables, num_keys, layout)
    splits = row_splits(num_keys, layout.config.split_size, layout.window)
    if len(splits.row) > layout.capacity:
        raise ValueError(f"the rows have {len(splits.row)} splits in all; accepted: up to capacity, {layout.capacity}")
    pages = visible_pages(block_tables, num_keys, splits, layout)
    groups = group_splits(pages, splits, layout.config.min_group_rows) if group else lone_splits(splits)
    runs = _ordered_runs(splits, groups)
    # The rows, run by run in the order of the runs.
    places = np.repeat(runs.start - runs.row_start, runs.num_rows) + np.arange(len(groups.order))
    items, wide_items = _cut(runs, layout, wide)
    return DecodeLists(
        items=items,
        wide_items=wide_items,
        rows=splits.row[groups.order[places]].astype(np.int32),
        first_partial=splits.first_pair.astype(np.int32),
    )


def check_work(work: DecodeWork, q: Tensor, kv: Tensor, batch: PagedBatch, rule: AttentionRule) -> None:
    """The work is for decode rows and a pool like these. Raises ValueError that names what isn't.

    q [num_rows, num_heads, head_dim], kv [num_pages, 2, num_kv_heads, page_size, head_dim].
    """
    layout, num_rows = work.layout, batch.num_keys.shape[0]
    if q.shape[0] != num_rows:
        raise ValueError(f"q has {q.shape[0]} rows for {num_rows} sequences; accepted: one each")
    if q.shape[1] // kv.shape[2] != layout.group or kv.shape[3] != layout.page_size or kv.shape[0] != layout.num_pages:
        raise ValueError(
            f"q has {q.shape[1]} heads and kv the shape {list(kv.shape)}; accepted by this work: groups of "
            f"{layout.group} heads, {layout.num_pages} pages of {layout.page_size}"
        )
    check_lists(work, num_rows, rule, q.device)


def check_lists(work: DecodeWork, num_rows: int, rule: AttentionRule, device: torch.device) -> None:
    """The lists lie on `device`, have room for `num_rows`, and no split is missing that the rule's window leaves.
    Raises ValueError that names the list."""
    layout = work.layout
    if layout.window is not None and (rule.window is None or rule.window > layout.window):
        raise ValueError(f"window is {rule.window}; accepted by this work: up to {layout.window}")
    shapes: dict[str, tuple[int, ...]] = {"items": (layout.capacity, 4), "rows": (layout.capacity,), "counts": (2,)}
    if work.wide_items is not None:
        shapes["wide_items"] = (layout.capacity, 4)
    for name, shape in shapes.items():
        _check_list(name, getattr(work, name), shape, device)
    _check_list("first_partial", work.first_partial, (None,), device)
    if work.first_partial.shape[0] < num_rows:
        raise ValueError(f"first_partial has {work.first_partial.shape[0]} rows; accepted: {num_rows} or more")


def _check_list(name: str, tensor: Tensor, shape: Sequence[int | None], device: torch.device) -> None:
    check_device({name: tensor}, device)
    check_dtype(name, tensor, (torch.int32,))
    check_shape(name, tensor, shape)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; accepted: a contiguous tensor")


@dataclass(frozen=True)
class _Runs:
    """Groups in the order of their items. A row alone is a group of one. All int64 [num_groups]."""

    start: LongArray
    """In `SplitGroups.order`."""
    num_rows: LongArray
    row_start: LongArray
    """In `DecodeLists.rows`."""
    table_row: LongArray
    split: LongArray


def _check_arrays(block_tables: IntArray, num_keys: IntArray, layout: DecodeLayout) -> None:
    if block_tables.dtype != np.int32 or block_tables.ndim != 2:
        raise ValueError(
            f"block_tables is {block_tables.dtype} {list(block_tables.shape)}; accepted: int32 [num_rows, max_pages]"
        )
    if num_keys.dtype != np.int32 or num_keys.shape != block_tables.shape[:1]:
        raise ValueError(
            f"num_keys is {num_keys.dtype} {list(num_keys.shape)}; accepted: int32 [{block_tables.shape[0]}]"
        )
    most = block_tables.shape[1] * layout.page_size
    wrong = np.flatnonzero((num_keys < 0) | (num_keys > most))
    if len(wrong):
        raise ValueError(
            f"num_keys is {num_keys[wrong[0]]} in row {wrong[0]}; accepted: 0 to {most}, what its pages hold"
        )


def _ordered_runs(splits: RowSplits, groups: SplitGroups) -> _Runs:
    starts, order = groups.starts, groups.order
    first = order[starts]
    keys = np.maximum.reduceat(splits.keys[order], starts) if len(starts) else starts
    ranks = np.lexsort((splits.row[first], splits.split[first], -keys))
    num_rows = np.diff(starts, append=len(order))[ranks]
    first = first[ranks]
    return _Runs(starts[ranks], num_rows, np.cumsum(num_rows) - num_rows, splits.row[first], splits.split[first])


def _cut(runs: _Runs, layout: DecodeLayout, wide: bool) -> tuple[IntArray, IntArray]:
    """Each run as items and wide items."""
    size = layout.rows_per_block
    wide_size = layout.config.row_blocks * size
    num_wide = np.zeros_like(runs.num_rows)
    if wide and wide_size > size:
        # What whole wide items leave over makes one more if it needs two row blocks.
        num_wide = runs.num_rows // wide_size + (runs.num_rows % wide_size > size)
    in_wide = np.minimum(num_wide * wide_size, runs.num_rows)
    items = _pieces(runs, in_wide, -(-(runs.num_rows - in_wide) // size), size)
    return items, _pieces(runs, np.zeros_like(in_wide), num_wide, wide_size)


def _pieces(runs: _Runs, skipped: LongArray, counts: LongArray, size: int) -> IntArray:
    """`counts` items of up to `size` rows of each run, from the row after the `skipped` ones."""
    run = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = skipped[run] + piece * size
    num_rows = np.minimum(runs.num_rows[run] - offset, size)
    columns = (runs.row_start[run] + offset, num_rows, runs.table_row[run], runs.split[run])
    return np.stack(columns, axis=1).astype(np.int32)
