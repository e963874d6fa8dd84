"""The deterministic ops against the plain formulas, and their rows bit by bit in other batches."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sapwood_kernels import cpu, cpu_deterministic, reference, reference_attention
from sapwood_kernels.values import AttentionRule, HeadNorms, PagedSequence, batch_of
from support.ops import assert_close, make_kv, paged_sequences, random_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = ((3, 1, 64), (9, 3, 64), (5, 5, 20), (8, 2, 128))
"""(num_heads, num_kv_heads, head_dim)."""
SIZES = (1, 33, 576, 1537)
COUNTS = (1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 64, 100, 257)
SLICES = tuple((first, first + count) for first in (0, 1, 7, 13) for count in COUNTS)
"""Rows computed by themselves, of NUM_ROWS."""
NUM_ROWS = 300

RowOp = Callable[[Tensor], Tensor]


def differing_slices(op: RowOp, x: Tensor) -> list[tuple[int, int]]:
    """Those whose rows have other bits than among all rows."""
    whole = op(x.clone())
    return [(a, b) for a, b in SLICES if not torch.equal(op(x[a:b].clone()), whole[a:b])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norms(dtype: torch.dtype, size: int) -> None:
    x, weight = random_tensor(NUM_ROWS, size) * 3, random_tensor(size, seed=2)
    added = random_tensor(NUM_ROWS, size, dtype=dtype, seed=1)
    assert_close(
        cpu_deterministic.rms_norm(x, weight, 1e-5, dtype), reference.rms_norm(x, weight, 1e-5, dtype), factor=2
    )
    mine, theirs = x.clone(), x.clone()
    assert_close(
        cpu_deterministic.add_rms_norm(added, mine, weight, 1e-5),
        reference.add_rms_norm(added, theirs, weight, 1e-5),
        factor=2,
    )
    assert torch.equal(mine, theirs)
    assert differing_slices(lambda rows: cpu_deterministic.rms_norm(rows, weight, 1e-5, dtype), x) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    gate_up = random_tensor(NUM_ROWS, 2 * size, dtype=dtype) * 4
    assert_close(cpu_deterministic.silu_mul(gate_up.clone()), reference.silu_mul(gate_up), factor=2)
    assert differing_slices(cpu_deterministic.silu_mul, gate_up) == []


def test_silu_of_large_numbers_is_finite() -> None:
    gate_up = torch.tensor([[1e4, -1e4, 0.0, 2.0, 2.0, 2.0]])
    assert cpu_deterministic.silu_mul(gate_up).tolist() == [[2e4, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_rope_kv_store_gives_a_row_the_same_bits(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim = heads
    qkv = random_tensor(NUM_ROWS, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos_sin = random_tensor(NUM_ROWS, head_dim, seed=1)
    norms = HeadNorms(random_tensor(head_dim, seed=2), random_tensor(head_dim, seed=3), 1e-6)

    def stored(rows: slice) -> tuple[Tensor, Tensor]:
        kv = make_kv(1 + -(-NUM_ROWS // 16), num_kv_heads, 16, head_dim, dtype)
        slots = torch.arange(16, 16 + NUM_ROWS)[rows]
        q = cpu_deterministic.rope_kv_store(qkv[rows].clone(), cos_sin[rows], slots, kv, norms)
        return q, kv[slots // 16, :, :, slots % 16]

    whole = stored(slice(0, NUM_ROWS))
    for first, last in SLICES:
        for part, of_all in zip(stored(slice(first, last)), whole, strict=True):
            assert torch.equal(part, of_all[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [16, 64])
def test_paged_prefill(dtype: torch.dtype, heads: tuple[int, int, int], page_size: int) -> None:
    """Within a tile, at its border and over several; unwritten slots hold NaN."""
    counts = [(1, 1), (7, 7), (33, 65), (1, 512), (2, 513), (3, 1100)]
    q, kv, sequences = paged_sequences(counts, heads, page_size, dtype)
    batch, rule = batch_of(sequences), AttentionRule(heads[2] ** -0.5)
    wanted = reference_attention.paged_prefill(q, kv, batch, None, rule)
    assert_close(cpu_deterministic.paged_prefill(q, kv, batch, sequences, rule), wanted, factor=2)


CHUNKS = ((600,), (1, 599), (7, 505, 88), (16, 495, 1, 1, 87), (300, 300), (511, 2, 87))


def differing_chunks(module: ModuleType, heads: tuple[int, int, int], dtype: torch.dtype) -> list[tuple[int, ...]]:
    """The ways to chunk 600 queries in which some attend to other bits than in one chunk."""
    q, kv, (whole,) = paged_sequences([(600, 600)], heads, 16, dtype)
    rule = AttentionRule(heads[2] ** -0.5)

    def in_chunks(sizes: tuple[int, ...]) -> Tensor:
        parts, start = [], 0
        for size in sizes:
            chunk = PagedSequence(0, size, whole.pages[: -(-(start + size) // 16)], start + size, dtype)
            rows = q[start : start + size].clone()
            parts.append(module.paged_prefill(rows, kv, batch_of([chunk]), [chunk], rule))
            start += size
        return torch.cat(parts)

    wanted = in_chunks(CHUNKS[0])
    return [sizes for sizes in CHUNKS if not torch.equal(in_chunks(sizes), wanted)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 8)])
def test_attention_gives_a_row_the_same_bits_in_every_chunk(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    assert differing_chunks(cpu_deterministic, heads, dtype) == []


def test_attention_gives_a_row_the_same_bits_beside_others() -> None:
    counts = [(5, 64), (1, 700), (40, 40)]
    q, kv, sequences = paged_sequences(counts, (6, 2, 32), 16, torch.bfloat16)
    rule = AttentionRule(0.2)
    together = cpu_deterministic.paged_prefill(q, kv, batch_of(sequences), sequences, rule)
    for sequence in sequences:
        rows = slice(sequence.first_query, sequence.first_query + sequence.num_queries)
        one = PagedSequence(0, sequence.num_queries, sequence.pages, sequence.num_keys, torch.bfloat16)
        alone = cpu_deterministic.paged_prefill(q[rows].clone(), kv, batch_of([one]), [one], rule)
        assert torch.equal(alone, together[rows])


def test_torchs_own_forms_are_not_the_same_bits() -> None:
    """What this module is for; and the comparisons above can fail."""
    assert differing_slices(torch.nn.functional.silu, random_tensor(NUM_ROWS, 33) * 4)
    assert differing_chunks(cpu, (9, 3, 64), torch.float32)


def test_pages_that_no_tile_is_made_of_are_refused() -> None:
    kv = make_kv(3, 1, 24, 8, torch.float32)
    sequence = PagedSequence(0, 1, torch.tensor([1]), 5, torch.float32)
    with pytest.raises(ValueError, match="kv has pages of 24 tokens; accepted: a divisor of 512"):
        cpu_deterministic.paged_prefill(torch.zeros(1, 1, 8), kv, batch_of([sequence]), [sequence], AttentionRule(1.0))
