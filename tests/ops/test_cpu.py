"""The fast CPU ops against the plain formulas, at shapes that no tuning had in mind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from sapwood_kernels import cpu, cpu_deterministic, reference, reference_attention
from sapwood_kernels.dispatch import cpu_ops
from sapwood_kernels.values import AttentionRule, HeadNorms, KVScales, PagedSequence, batch_of
from support.ops import assert_close, make_kv, paged_sequences, random_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = ((1, 1, 8), (3, 1, 64), (9, 3, 64), (5, 5, 20), (24, 1, 16), (8, 2, 128))
"""(num_heads, num_kv_heads, head_dim)."""


OPS = ("rms_norm", "add_rms_norm", "silu_mul", "rope_kv_store", "paged_prefill")
DENSE_OPS = ("rotate", "norm_heads", "dense_decode")


def parameters(function: Callable[..., object]) -> list[tuple[str, object]]:
    return [(parameter.name, parameter.default) for parameter in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("module", [cpu, cpu_deterministic])
def test_every_implementation_has_the_same_signatures(module: ModuleType) -> None:
    for name in (*OPS, *DENSE_OPS):
        plain = getattr(reference, name, None) or getattr(reference_attention, name)
        assert parameters(getattr(module, name)) == parameters(plain), name


def test_dispatch_names_the_implementations() -> None:
    assert cpu_ops().silu_mul is cpu.silu_mul
    assert cpu_ops(deterministic=True).silu_mul is cpu_deterministic.silu_mul


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("hidden", [1, 33, 576])
def test_norms(dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    x = random_tensor(num_tokens, hidden, dtype=dtype)
    residual = random_tensor(num_tokens, hidden, seed=1) * 3
    weight = random_tensor(hidden, seed=2)
    assert_close(cpu.rms_norm(residual, weight, 1e-5, dtype), reference.rms_norm(residual, weight, 1e-5, dtype))
    mine, theirs = residual.clone(), residual.clone()
    wanted = reference.add_rms_norm(x.clone(), theirs, weight, 1e-5)
    assert_close(cpu.add_rms_norm(x.clone(), mine, weight, 1e-5), wanted)
    assert torch.equal(mine, theirs)


def test_the_norm_of_zeros_is_zero() -> None:
    zeros, weight = torch.zeros(2, 8), torch.ones(8)
    for rows in (zeros, zeros[:1]):
        assert torch.equal(cpu.rms_norm(rows, weight, 1e-6, torch.float32), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (1, 1536), (5, 33)])
def test_silu_mul(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    gate_up = random_tensor(num_tokens, 2 * size, dtype=dtype) * 4
    assert_close(cpu.silu_mul(gate_up.clone()), reference.silu_mul(gate_up), factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_kv_store(dtype: torch.dtype, heads: tuple[int, int, int], normed: bool) -> None:
    num_heads, num_kv_heads, head_dim = heads
    num_tokens, page_size = 5, 16
    qkv = random_tensor(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos_sin = random_tensor(num_tokens, head_dim, seed=1)
    slots = torch.tensor([31, 16, 50, 95, 64])
    norms = HeadNorms(random_tensor(head_dim, seed=2), random_tensor(head_dim, seed=3), 1e-6) if normed else None
    mine, theirs = (make_kv(6, num_kv_heads, page_size, head_dim, dtype) for _ in range(2))
    untouched = mine.clone()
    q = cpu.rope_kv_store(qkv, cos_sin, slots, mine, norms)
    assert_close(q, reference.rope_kv_store(qkv, cos_sin, slots, theirs, norms), factor=2)
    assert_close(mine, theirs, factor=2)
    written = torch.zeros(6, page_size, dtype=torch.bool)
    written.view(-1)[slots] = True
    changed = (mine != untouched).any(dim=4).any(dim=2).any(dim=1)
    assert torch.equal(changed, written), "exactly the given slots are written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_paged_prefill(dtype: torch.dtype, heads: tuple[int, int, int], page_size: int) -> None:
    """Rows of one query too, as those are that decode from pages."""
    counts = [(1, 1), (7, 7), (1, 100), (33, 65), (5, 64), (2, 17), (1, 16)]
    q, kv, sequences = paged_sequences(counts, heads, page_size, dtype)
    rule = AttentionRule(heads[2] ** -0.5)
    wanted = reference_attention.paged_prefill(q, kv, batch_of(sequences), None, rule)
    assert_close(cpu.paged_prefill(q, kv, batch_of(sequences), sequences, rule), wanted, factor=2)


@pytest.mark.parametrize("module", [cpu, cpu_deterministic])
@pytest.mark.parametrize(
    ("rule", "scales", "message"),
    [
        (AttentionRule(1.0, window=5), KVScales(), "window is 5; accepted on the CPU: None"),
        (AttentionRule(1.0, softcap=30.0), KVScales(), "softcap is 30.0; accepted on the CPU: None"),
        (AttentionRule(1.0, sinks=torch.zeros(4)), KVScales(), "sinks is tensor"),
        (AttentionRule(1.0), KVScales(value=0.5), "scales are KVScales"),
    ],
)
def test_what_the_cpu_does_not_compute_is_refused(
    module: ModuleType, rule: AttentionRule, scales: KVScales, message: str
) -> None:
    q, kv, sequences = paged_sequences([(5, 64)], (4, 2, 16), 16, torch.float32)
    with pytest.raises(ValueError, match=message):
        module.paged_prefill(q, kv, batch_of(sequences), sequences, rule, scales)


def test_scales_of_8_bits_are_refused_when_storing_too() -> None:
    kv = make_kv(3, 1, 16, 8, torch.float32)
    with pytest.raises(ValueError, match="scales are KVScales"):
        cpu.rope_kv_store(torch.zeros(1, 24), torch.zeros(1, 8), torch.tensor([16]), kv, None, KVScales(key=2.0))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_keys", [1, 2, 63, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_decode(heads: tuple[int, int, int], num_keys: int, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim = heads
    q = random_tensor(1, num_kv_heads, num_heads // num_kv_heads, head_dim).to(dtype)
    keys, values = (
        random_tensor(1, num_kv_heads, 320, head_dim, seed=seed).to(dtype)[:, :, :num_keys] for seed in (1, 2)
    )
    mine = cpu.dense_decode(q, keys, values, 0.3)
    assert_close(mine, reference.dense_decode(q, keys, values, 0.3), factor=8)


@pytest.mark.parametrize("ops", [cpu, reference])
def test_rotate_and_norm_heads(ops: ModuleType) -> None:
    heads, rotations = random_tensor(3, 5, 8), random_tensor(3, 8, 8, seed=1)
    out = torch.empty_like(heads)
    ops.rotate(heads, rotations, out)
    assert_close(out, torch.einsum("thd,tde->the", heads, rotations), factor=4)
    norms = HeadNorms(random_tensor(8, seed=2), random_tensor(8, seed=3), 1e-6)
    normed = heads.clone()
    ops.norm_heads(normed, 3, norms)
    unit = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    wanted = torch.cat((unit[:, :3] * norms.query, unit[:, 3:] * norms.key), dim=1)
    assert_close(normed, wanted, factor=4)


def test_a_wrong_op_is_noticed() -> None:
    """The comparison has teeth: an attention that sees one key too many, or a scale off by 5%, fails it."""
    q, kv, sequences = paged_sequences([(5, 64)], (4, 2, 16), 16, torch.bfloat16)
    batch, rule = batch_of(sequences), AttentionRule(0.25)
    wanted = reference_attention.paged_prefill(q, kv, batch, None, rule)
    too_many = PagedSequence(0, 5, sequences[0].pages, 64, torch.bfloat16)
    assert too_many.mask is not None
    too_many.mask.zero_()
    for found in (
        cpu.paged_prefill(q, kv, batch, [too_many], rule),
        cpu.paged_prefill(q, kv, batch, sequences, AttentionRule(0.25 * 1.05)),
    ):
        with pytest.raises(AssertionError):
            assert_close(found, wanted, factor=2)


def test_a_layout_that_is_not_the_cpus_is_refused() -> None:
    """`kv.view` fails instead of writing to a copy."""
    kv = torch.zeros(3, 2, 1, 16, 8)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        cpu.rope_kv_store(torch.zeros(1, 24), torch.zeros(1, 8), torch.tensor([16]), kv, None)
