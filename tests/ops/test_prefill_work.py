"""The list of query blocks: every query once, long blocks first."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_kernels.config_table import AttentionConfig
from sapwood_kernels.prefill_work import (
    PrefillWork,
    build_prefill_work,
    place_prefill_work,
    prefill_capacity,
    queries_per_block,
)
from support.scale import scaled

CONFIG = AttentionConfig(block_m=32, block_n=32, num_warps=4, num_stages=1, max_registers=255)
BATCHES = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 300)), max_size=8)


def counts(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def test_a_block_has_as_many_queries_as_padded_groups_fit() -> None:
    found = [queries_per_block(CONFIG, group) for group in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32)]
    assert found == [32, 16, 8, 8, 4, 4, 2, 2, 1, 1]
    for group in (0, 33):
        with pytest.raises(ValueError, match=f"group is {group}; accepted: 1 to block_m, 32"):
            queries_per_block(CONFIG, group)


def test_blocks_that_read_most_tiles_come_first() -> None:
    """8 queries a block, 32 keys a tile. Sequence 0: blocks end at 24, 32, 36 keys: 1, 1 and 2 tiles; sequence 2: at 64
    and 68: 2 and 3."""
    items = build_prefill_work(counts(20, 0, 12), counts(36, 7, 68), CONFIG, 4)
    assert items.dtype == np.int32
    assert items.tolist() == [[2, 1], [0, 2], [2, 0], [0, 0], [0, 1]]


def test_queries_without_keys_come_last() -> None:
    assert build_prefill_work(counts(3, 20, 3), counts(0, 9, 33), CONFIG, 4).tolist() == [
        [2, 0],
        [1, 1],
        [1, 2],
        [0, 0],
        [1, 0],
    ]


def test_no_sequences() -> None:
    assert build_prefill_work(counts(), counts(), CONFIG, 4).shape == (0, 2)


@settings(max_examples=scaled(400, 40))
@given(batch=BATCHES, group=st.integers(1, 32))
def test_every_query_is_in_one_block_and_the_capacity_holds_them(batch: list[tuple[int, int]], group: int) -> None:
    num_queries = counts(*(queries for queries, _ in batch))
    items = build_prefill_work(num_queries, counts(*(keys for _, keys in batch)), CONFIG, group)
    block_q = queries_per_block(CONFIG, group)
    covered = [(s, query) for s, block in items.tolist() for query in range(block * block_q, (block + 1) * block_q)]
    wanted = {(s, query) for s, queries in enumerate(num_queries.tolist()) for query in range(queries)}
    assert len(covered) == len(set(covered))
    assert wanted <= set(covered)
    assert all(block * block_q < num_queries[s] for s, block in items.tolist())
    assert len(items) <= prefill_capacity(int(num_queries.sum()), len(batch), CONFIG, group)


def test_the_capacity_is_needed() -> None:
    """Sequences of one token, all but one: each has a block for itself."""
    assert prefill_capacity(30, 5, CONFIG, 4) == len(
        build_prefill_work(counts(1, 1, 1, 1, 26), counts(*[99] * 5), CONFIG, 4)
    )
    assert prefill_capacity(3, 5, CONFIG, 4) == len(build_prefill_work(counts(1, 1, 1), counts(9, 9, 9), CONFIG, 4))


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "message"),
    [
        (np.array([1]), counts(1), r"num_queries is int64 \[1\]; accepted: int32 \[num_sequences\], both alike"),
        (counts(1), counts(1, 2), r"num_keys is int32 \[2\]; accepted: int32"),
        (counts(1).reshape(1, 1), counts(1), r"num_queries is int32 \[1, 1\]; accepted: int32"),
        (counts(-1), counts(1), "num_queries holds -1; accepted: 0 or more"),
        (counts(1), counts(-5), "num_keys holds -5; accepted: 0 or more"),
    ],
)
def test_counts_that_cannot_be_are_refused(
    num_queries: npt.NDArray[np.int32], num_keys: npt.NDArray[np.int32], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_prefill_work(num_queries, num_keys, CONFIG, 4)


def test_buffers_that_cannot_be_are_refused() -> None:
    work = place_prefill_work(build_prefill_work(counts(20), counts(36), CONFIG, 4), CONFIG, 90, torch.device("cpu"))
    assert (work.num_blocks, work.count.tolist(), work.items.shape, work.arch) == (3, [3], (3, 2), 90)
    changes: list[tuple[dict[str, object], str]] = [
        ({"items": work.items[:, :1]}, r"items has shape \[3, 1\]; accepted: \[any, 2\]"),
        ({"items": work.items.long()}, "items is torch.int64; accepted: torch.int32"),
        ({"items": work.items.repeat(1, 2)[:, :2]}, r"items has strides \[4, 1\]; accepted: a contiguous tensor"),
        ({"count": work.items}, r"count has shape \[3, 2\]; accepted: \[1\]"),
        ({"count": work.count.float()}, "count is torch.float32; accepted: torch.int32"),
        ({"num_blocks": 4}, "num_blocks is 4; accepted: 0 to items' capacity, 3"),
        ({"num_blocks": -1}, "num_blocks is -1; accepted"),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(work, **change)  # type: ignore[arg-type]
    assert isinstance(dataclasses.replace(work, num_blocks=2), PrefillWork)
