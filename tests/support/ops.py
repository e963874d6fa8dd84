"""Inputs for ops, and how close their results must be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood_kernels.values import PagedSequence


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normally distributed, of unit variance."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_kv(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Random pages in the CPU's layout, seen as `[num_pages, 2, num_kv_heads, page_size, head_dim]`; page 0 is zero."""
    pages = random_tensor(2, num_kv_heads, num_pages, page_size, head_dim, dtype=dtype, seed=9)
    pages[:, :, 0] = 0
    return pages.permute(2, 0, 1, 3, 4)


def paged_sequences(
    counts: Sequence[tuple[int, int]], heads: tuple[int, int, int], page_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[PagedSequence]]:
    """Queries, pages in random order (poisoned where no token lies) and sequences of (num_queries, num_keys) each;
    `heads` is (num_heads, num_kv_heads, head_dim)."""
    num_heads, num_kv_heads, head_dim = heads
    num_pages = 1 + sum(-(-keys // page_size) for _, keys in counts)
    kv = make_kv(num_pages, num_kv_heads, page_size, head_dim, dtype)
    free = (1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(4))).tolist()
    sequences, first = [], 0
    for num_queries, num_keys in counts:
        pages = torch.tensor([free.pop() for _ in range(-(-num_keys // page_size))])
        if num_keys % page_size:
            kv[pages[-1], :, :, num_keys % page_size :] = float("nan")
        sequences.append(PagedSequence(first, num_queries, pages, num_keys, dtype))
        first += num_queries
    return random_tensor(first, num_heads, head_dim, dtype=dtype), kv, sequences


def assert_close(found: Tensor, wanted: Tensor, factor: float = 1.0) -> None:
    """Within some roundings of the dtype: `factor` units in the last place of the largest element, and in fp32 a few
    more for sums in another order."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    unit = torch.finfo(wanted.dtype).eps * (8.0 if wanted.dtype == torch.float32 else 1.0)
    largest = float(wanted.abs().max())
    worst = float((found.float() - wanted.float()).abs().max())
    limit = factor * unit * max(largest, 1e-3)
    assert worst <= limit, f"differs by {worst:.3g}; accepted: {limit:.3g}"
