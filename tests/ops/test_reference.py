"""The formulas against torch's own and against arithmetic by hand."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from sapwood_kernels import reference
from sapwood_kernels.values import HeadNorms, KVScales
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


def test_a_token_without_a_slot_is_not_stored_and_scales_divide() -> None:
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]])
    cos_sin = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    kv = make_kv(3, 1, 16, 2, torch.float32)
    untouched = kv.clone()
    q = reference.rope_kv_store(qkv, cos_sin, torch.tensor([-1, 40]), kv, None, KVScales(key=2.0, value=4.0))
    assert q.tolist() == [[[1.0, 2.0]], [[7.0, 8.0]]]
    assert kv[2, :, 0, 8].tolist() == [[4.5, 5.0], [2.75, 3.0]]
    kv[2, :, 0, 8] = untouched[2, :, 0, 8]
    assert torch.equal(kv, untouched)
