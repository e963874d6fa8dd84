"""Which rows of a batch share the pages of which splits, found on the host: numpy alone, no loop over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sapwood_kernels.decode_layout import DecodeLayout

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

# Of a polynomial hash modulo 2 ** 64 (an odd number near 2 ** 64 / golden ratio). Neighbours of equal hash are compared
# in full, so a collision can only tear a group apart.
_HASH_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class RowSplits:
    """Every row with each of the splits it sees keys of, row by row."""

    row: LongArray
    """[num_pairs]."""
    split: LongArray
    """[num_pairs]."""
    keys: LongArray
    """[num_pairs]: of the split, up to its size."""
    first_pair: LongArray
    """[num_rows]: the place of a row's split 0, had it been listed; negative where a window hides the first ones."""


@dataclass(frozen=True, kw_only=True)
class SplitGroups:
    """Pairs of a row and a split, put side by side where they read the same keys."""

    order: LongArray
    """[num_pairs]: places in RowSplits. Rows of a group ascend."""
    starts: LongArray
    """[num_groups]: where in the order each group begins."""


def row_splits(num_keys: IntArray, split_size: int, window: int | None) -> RowSplits:
    """The splits of rows of `num_keys` int32 [num_rows] keys, less those before the window of a row's last key."""
    keys = num_keys.astype(np.int64)
    first_split = np.zeros_like(keys) if window is None else np.maximum(keys - window, 0) // split_size
    counts = -(-keys // split_size) - first_split
    first_pair = np.cumsum(counts) - counts - first_split
    row = np.repeat(np.arange(len(keys)), counts)
    split = np.arange(len(row)) - first_pair[row]
    split_keys = np.minimum(keys[row] - split * split_size, split_size)
    return RowSplits(row=row, split=split, keys=split_keys, first_pair=first_pair)


def visible_pages(block_tables: IntArray, num_keys: IntArray, splits: RowSplits, layout: DecodeLayout) -> IntArray:
    """[num_pairs, pages_per_split]: each split's pages, and 0 where the row sees no key.

    Raises ValueError for a page that a row reads and that isn't in the pool, or is page 0.
    """
    size = layout.pages_per_split
    seen = np.arange(size) < -(-splits.keys // layout.page_size)[:, None]
    if layout.window is not None:
        first_page = np.maximum(num_keys.astype(np.int64) - layout.window, 0) // layout.page_size
        seen &= np.arange(size) >= (first_page[splits.row] - splits.split * size)[:, None]
    # A copy in blocks of a split's pages: numpy gathers those four times as fast as single pages.
    used = min(block_tables.shape[1], -(-int(num_keys.max(initial=0)) // layout.page_size))
    num_rows, num_blocks = len(num_keys), -(-used // size)
    copied = np.zeros((num_rows, num_blocks * size), dtype=np.int32)
    copied[:, :used] = block_tables[:, :used]
    pages = np.where(seen, copied.reshape(num_rows, num_blocks, size)[splits.row, splits.split], 0)
    wrong = seen & (pages == 0) | (pages < 0) | (pages >= layout.num_pages)
    if wrong.any():
        pair, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"block_tables holds page {pages[pair, column]} in row {splits.row[pair]}, column "
            f"{splits.split[pair] * size + column}; accepted: 1 to {layout.num_pages - 1}"
        )
    return pages


def group_splits(pages: IntArray, splits: RowSplits, min_rows: int) -> SplitGroups:
    """Pairs of the same split and the same `pages`, [num_pairs, pages_per_split], make a group if there are at least
    `min_rows` of them; others stay by themselves."""
    powers = np.array([pow(_HASH_BASE, power, 2**64) for power in range(1, pages.shape[1] + 1)], dtype=np.uint64)
    hashes = pages.astype(np.uint64) @ powers
    # The pair's own place in the lowest bits: so sorting values, which is fastest, also gives the order.
    low = np.uint64((1 << len(pages).bit_length()) - 1)
    hashes = np.sort(hashes & ~low | np.arange(len(pages), dtype=np.uint64))
    order = (hashes & low).astype(np.int64)
    same = (splits.split[order[1:]] == splits.split[order[:-1]]) & (hashes[1:] ^ hashes[:-1] <= low)
    alike = np.flatnonzero(same)
    same[alike] = (pages[order[alike + 1]] == pages[order[alike]]).all(axis=1)
    is_start = np.concatenate((np.ones(min(len(order), 1), dtype=np.bool_), ~same))
    if min_rows > 2:
        counts = np.diff(np.flatnonzero(is_start), append=len(order))
        is_start |= np.repeat(counts < min_rows, counts)
    return SplitGroups(order=order, starts=np.flatnonzero(is_start))


def lone_splits(splits: RowSplits) -> SplitGroups:
    """Every pair by itself."""
    places = np.arange(len(splits.row))
    return SplitGroups(order=places, starts=places)
