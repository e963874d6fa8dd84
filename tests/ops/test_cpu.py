"""The fast CPU ops against the plain formulas, at shapes that no tuning had in mind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sapwood_kernels import cpu, reference
from sapwood_kernels.dispatch import CpuOps, cpu_ops, reference_ops
from sapwood_kernels.values import HeadNorms, PagedSequence, plan_sequence
from support.ops import assert_close, make_kv, random_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = ((1, 1, 8), (3, 1, 64), (9, 3, 64), (5, 5, 20), (24, 1, 16), (8, 2, 128))
"""(num_heads, num_kv_heads, head_dim)."""


def public_functions(module: ModuleType) -> dict[str, Callable[..., object]]:
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def test_both_implementations_have_the_same_signatures() -> None:
    fast, plain = public_functions(cpu), public_functions(reference)
    assert fast.keys() <= plain.keys()
    for name, function in fast.items():
        assert inspect.signature(function) == inspect.signature(plain[name]), name


def test_dispatch_names_the_implementations() -> None:
    assert cpu_ops().silu_mul is cpu.silu_mul
    assert reference_ops().silu_mul is reference.silu_mul


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


def prefill_case(
    counts: list[tuple[int, int]], heads: tuple[int, int, int], page_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[PagedSequence], float]:
    """Queries, pages (poisoned where no token lies), sequences and scale for (num_queries, num_keys) pairs."""
    num_heads, num_kv_heads, head_dim = heads
    num_pages = 1 + sum(-(-keys // page_size) for _, keys in counts)
    kv = make_kv(num_pages, num_kv_heads, page_size, head_dim, dtype)
    free = (1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(4))).tolist()
    sequences, first = [], 0
    for num_queries, num_keys in counts:
        pages = torch.tensor([free.pop() for _ in range(-(-num_keys // page_size))])
        if num_keys % page_size:
            kv[pages[-1], :, :, num_keys % page_size :] = 1000.0
        sequences.append(plan_sequence(first, num_queries, pages, num_keys, dtype))
        first += num_queries
    return random_tensor(first, num_heads, head_dim, dtype=dtype), kv, sequences, head_dim**-0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_paged_prefill(dtype: torch.dtype, heads: tuple[int, int, int], page_size: int) -> None:
    counts = [(1, 1), (7, 7), (1, 100), (33, 65), (5, 64), (2, 17)]
    q, kv, sequences, scale = prefill_case(counts, heads, page_size, dtype)
    wanted = reference.paged_prefill(q, kv, sequences, scale)
    assert_close(cpu.paged_prefill(q, kv, sequences, scale), wanted, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_paged_decode(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    q, kv, sequences, scale = prefill_case([(1, 1), (1, 16), (1, 17), (1, 130)], heads, 16, dtype)
    assert_close(cpu.paged_decode(q, kv, sequences, scale), reference.paged_decode(q, kv, sequences, scale), factor=2)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_keys", [1, 2, 63, 300])
def test_dense_decode(heads: tuple[int, int, int], num_keys: int) -> None:
    num_heads, num_kv_heads, head_dim = heads
    q = random_tensor(num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys = random_tensor(num_kv_heads, head_dim, 320, seed=1)[..., :num_keys]
    values = random_tensor(num_kv_heads, 320, head_dim, seed=2)[:, :num_keys]
    mine, theirs = torch.empty_like(q), torch.empty_like(q)
    cpu.dense_decode(q, keys, values, 0.3, mine)
    reference.dense_decode(q, keys, values, 0.3, theirs)
    assert_close(mine, theirs, factor=8)


@pytest.mark.parametrize("ops", [cpu_ops(), reference_ops()], ids=["cpu", "reference"])
def test_rotate_and_norm_heads(ops: CpuOps) -> None:
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
    """The comparison has teeth: an attention that sees one key too many, or a scale off by 1%, fails it."""
    q, kv, sequences, scale = prefill_case([(5, 64)], (4, 2, 16), 16, torch.bfloat16)
    wanted = reference.paged_prefill(q, kv, sequences, scale)
    too_many = torch.zeros(5, 64, dtype=torch.bfloat16)
    wrong = [PagedSequence(0, 5, sequences[0].pages, 64, too_many)]
    for found in (cpu.paged_prefill(q, kv, wrong, scale), cpu.paged_prefill(q * 1.05, kv, sequences, scale)):
        with pytest.raises(AssertionError):
            assert_close(found, wanted, factor=2)


def test_a_layout_that_is_not_the_cpus_is_refused() -> None:
    """`kv.view` fails instead of writing to a copy."""
    kv = torch.zeros(3, 2, 1, 16, 8)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        cpu.rope_kv_store(torch.zeros(1, 24), torch.zeros(1, 8), torch.tensor([16]), kv, None)
