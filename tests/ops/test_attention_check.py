"""What the attention kernels refuse, each with the tensor's name, what it was and what is accepted."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood_kernels.attention_check import FP8, check_attention, check_block_table, check_paged
from sapwood_kernels.config_table import INTERPRETER_ARCH
from sapwood_kernels.values import AttentionRule, PagedBatch

RULE = AttentionRule(0.125)
Q = torch.zeros(5, 4, 64)
KV = torch.zeros(9, 2, 2, 16, 64)
BATCH = PagedBatch(
    block_table=torch.tensor([[8, 1, -7], [3, 2**30, 0]], dtype=torch.int32),
    num_keys=torch.tensor([17, 16], dtype=torch.int32),
    first_query=torch.tensor([0, 5, 5], dtype=torch.int32),
)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_what_fits_passes_and_entries_that_no_one_reads_may_be_anything() -> None:
    check_attention(Q, KV, BATCH, RULE, INTERPRETER_ARCH)
    check_attention(Q, KV, BATCH, replace(RULE, sinks=torch.zeros(4)), 90)
    check_attention(Q.half(), KV.to(FP8), BATCH, RULE, 89)


def test_a_page_that_a_window_has_left_may_be_anything() -> None:
    """The five queries stand at 12 to 16; a window of 12 goes back to position 1, one of 5 to position 8."""
    batch = replace(BATCH, num_keys=ints(33, 16), block_table=torch.tensor([[-5, 1, 2], [3, 0, 0]], dtype=torch.int32))
    check_attention(Q, KV, batch, replace(RULE, window=13), INTERPRETER_ARCH)
    with pytest.raises(ValueError, match="block_table holds -5 to 3; accepted: 1 to 8"):
        check_attention(Q, KV, batch, replace(RULE, window=14), INTERPRETER_ARCH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[0]}, "q has shape [4, 64]; accepted: [any, any, any]"),
        ({"q": Q.double()}, "q is torch.float64; accepted: torch.bfloat16, torch.float16, torch.float32"),
        ({"q": Q[..., :60]}, "kv has shape [9, 2, 2, 16, 64]; accepted: [any, 2, any, any, 60]"),
        ({"q": torch.zeros(5, 4, 128)[..., ::2]}, "q has strides [512, 128, 2]; accepted: 1 for the last dimension"),
        ({"q": Q[:, :3]}, "3 query heads over 2 key-value heads; accepted: a multiple"),
        ({"q": torch.zeros(5, 66, 64)}, "q has 33 heads to one of kv's 2; accepted: up to 32"),
        ({"q": Q.to("meta")}, "kv is on cpu; accepted: meta"),
        ({"kv": KV[:, :1]}, "kv has shape [9, 1, 2, 16, 64]; accepted: [any, 2, any, any, 64]"),
        ({"kv": KV.half()}, "kv is torch.float16; accepted: torch.float32, torch.float8_e4m3fn"),
        ({"kv": KV.to(torch.float8_e5m2)}, "kv is torch.float8_e5m2; accepted: torch.float32, torch.float8_e4m3fn"),
        ({"kv": KV.to(FP8), "arch": 80}, "kv is torch.float8_e4m3fn on compute capability 80; accepted: 89 or newer"),
        ({"kv": torch.zeros(9, 2, 2, 8, 64)}, "kv has page_size 8; accepted: 16, 32, 64"),
        ({"kv": torch.zeros(9, 2, 2, 48, 64)}, "kv has page_size 48; accepted: 16, 32, 64"),
        ({"q": torch.zeros(5, 4, 72), "kv": torch.zeros(9, 2, 2, 16, 72)}, "kv has head_dim 72; accepted: 64, 80, 96"),
        ({"kv": torch.zeros(9, 2, 2, 64, 16).mT}, "kv has strides"),
        ({"block_table": ints(8, 1)}, "block_table has shape [2]; accepted: [any, any]"),
        ({"block_table": BATCH.block_table.long()}, "block_table is torch.int64; accepted: torch.int32"),
        ({"block_table": BATCH.block_table.T.contiguous().T}, "block_table has strides [1, 2]; accepted: 1"),
        ({"block_table": ints(9, 1, 3, 4).view(2, 2)}, "block_table holds 1 to 9; accepted: 1 to 8"),
        ({"block_table": ints(8, 0, 3, 4).view(2, 2)}, "block_table holds 0 to 8; accepted: 1 to 8"),
        ({"block_table": ints(8, 3).view(2, 1)}, "num_keys holds 16 to 17; accepted: 0 to 16, 1 pages of 16"),
        ({"num_keys": ints(17)}, "num_keys has shape [1]; accepted: [2]"),
        ({"num_keys": torch.zeros(2)}, "num_keys is torch.float32; accepted: torch.int32"),
        ({"num_keys": ints(17, -1)}, "num_keys holds -1 to 17; accepted: 0 to 48"),
        ({"num_keys": ints(17, 0, 16, 0)[::2]}, "num_keys has strides [2]; accepted: 1"),
        ({"first_query": ints(0, 5)}, "first_query has shape [2]; accepted: [3]"),
        ({"first_query": ints(0, 5, 4)}, "first_query is [0, 5, 4]; accepted: ascending from 0 to q's rows, 5"),
        ({"first_query": ints(0, 6, 5)}, "first_query is [0, 6, 5]; accepted: ascending"),
        ({"first_query": ints(1, 5, 5)}, "first_query is [1, 5, 5]; accepted: ascending from 0"),
        ({"first_query": ints(0, 5, 5).to("meta")}, "first_query is on meta; accepted: cpu"),
        ({"rule": replace(RULE, sinks=torch.zeros(2))}, "sinks has shape [2]; accepted: [4]"),
        ({"rule": replace(RULE, sinks=torch.zeros(4).half())}, "sinks is torch.float16; accepted: torch.float32"),
        ({"rule": replace(RULE, sinks=torch.zeros(8)[::2])}, "sinks has strides [2]; accepted: 1"),
        ({"rule": AttentionRule(0.0)}, "scale is 0.0; accepted: a finite number over 0"),
        ({"rule": AttentionRule(float("nan"))}, "scale is nan; accepted: a finite number over 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    batch = replace(BATCH, **{name: changes[name] for name in vars(BATCH) if name in changes})  # type: ignore[arg-type]
    inputs = {"q": Q, "kv": KV, "batch": batch, "rule": RULE, "arch": INTERPRETER_ARCH}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        check_attention(**(inputs | {name: changes[name] for name in changes if name in inputs}))  # type: ignore[arg-type]


def test_the_formulas_take_what_no_kernel_is_made_for() -> None:
    check_paged(Q.double(), torch.zeros(9, 2, 1, 48, 64).half(), BATCH, RULE)
    with pytest.raises(ValueError, match="num_keys has shape"):
        check_paged(Q, KV, replace(BATCH, num_keys=ints(17)), RULE)


def test_values_on_a_device_are_not_copied() -> None:
    """They'd have to be waited for. The meta device has none at all."""
    batch = PagedBatch(*(tensor.to("meta") for tensor in vars(BATCH).values()))
    check_attention(Q.to("meta"), KV.to("meta"), batch, RULE, 90)


def test_a_table_is_checked_where_it_is_read() -> None:
    table = np.array([[5, 99, 99], [99, 4, 99]], dtype=np.int32)
    counts = np.array([16, 20], dtype=np.int32)
    check_block_table(table, counts, 16, 6, first_key=np.array([0, 16], dtype=np.int32))
    with pytest.raises(ValueError, match="block_table holds 4 to 99; accepted: 1 to 5"):
        check_block_table(table, counts, 16, 6, first_key=np.array([0, 15], dtype=np.int32))
    with pytest.raises(ValueError, match="block_table holds 4 to 99; accepted: 1 to 5"):
        check_block_table(table, counts + 1, 16, 6, first_key=np.array([0, 16], dtype=np.int32))
    with pytest.raises(ValueError, match=re.escape("block_table has shape [2, 3] and num_keys [1]; accepted: [num")):
        check_block_table(table, counts[:1], 16, 6)
    check_block_table(table[:0], counts[:0], 16, 6)
