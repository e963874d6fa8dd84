"""The formulas against torch's own and against arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from sapwood_kernels import reference
from sapwood_kernels.values import HeadNorms, plan_sequence
from support.ops import assert_close, make_kv, random_tensor


def test_norms_are_torchs() -> None:
    x, weight = random_tensor(3, 20), random_tensor(20, seed=1)
    assert_close(reference.rms_norm(x, weight, 1e-3, torch.float32), functional.rms_norm(x, (20,), weight, 1e-3))
    residual = random_tensor(3, 20, seed=2)
    wanted = functional.rms_norm(x + residual, (20,), weight, 1e-3)
    assert_close(reference.add_rms_norm(x, residual, weight, 1e-3), wanted)


def test_silu_mul_is_torchs() -> None:
    gate_up = random_tensor(2, 10) * 5
    assert_close(reference.silu_mul(gate_up), functional.silu(gate_up[:, :5]) * gate_up[:, 5:])


def test_a_quarter_turn_swaps_halves() -> None:
    """Angle pi / 2 takes (x, y) to (-y, x)."""
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]])
    cos_sin = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    kv = make_kv(2, 1, 16, 4, torch.float32)
    q = reference.rope_kv_store(qkv, cos_sin, torch.tensor([18]), kv, None)
    assert q.tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]
    assert kv[1, 0, 0, 2].tolist() == [-7.0, -8.0, 5.0, 6.0]
    assert kv[1, 1, 0, 2].tolist() == [9.0, 10.0, 11.0, 12.0]


def test_heads_are_normed_before_they_turn() -> None:
    qkv = torch.tensor([[3.0, 4.0, 6.0, 8.0, 1.0, 1.0]])
    kv = make_kv(2, 1, 16, 2, torch.float32)
    norms = HeadNorms(torch.tensor([1.0, 10.0]), torch.tensor([1.0, 1.0]), 0.0)
    q = reference.rope_kv_store(qkv, torch.tensor([[0.0, 1.0]]), torch.tensor([16]), kv, norms)
    root = math.sqrt(12.5)
    assert_close(q, torch.tensor([[[-40.0 / root, 3.0 / root]]]))
    assert_close(kv[1, 0, 0, 0], torch.tensor([-8.0, 6.0]) / math.sqrt(50))


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("num_queries", [1, 5, 40])
def test_paged_attention_is_torchs_on_contiguous_tokens(page_size: int, num_queries: int) -> None:
    keys, values = random_tensor(2, 40, 8, seed=1), random_tensor(2, 40, 8, seed=2)
    q = random_tensor(num_queries, 6, 8)
    kv = make_kv(6, 2, page_size, 8, torch.float32)
    pages = torch.tensor([4, 2, 5][: -(-40 // page_size)])
    for position in range(40):
        page, slot = int(pages[position // page_size]), position % page_size
        kv[page, 0, :, slot], kv[page, 1, :, slot] = keys[:, position], values[:, position]
    visible = torch.ones(num_queries, 40, dtype=torch.bool).tril(40 - num_queries)
    wanted = functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys.repeat_interleave(3, 0), values.repeat_interleave(3, 0), visible, scale=0.7
    ).transpose(0, 1)
    sequence = plan_sequence(0, num_queries, pages, 40, torch.float32)
    assert_close(reference.paged_prefill(q, kv, [sequence], 0.7), wanted, factor=2)
