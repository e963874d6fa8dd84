"""Inputs for ops, and how close their results must be."""

from __future__ import annotations

import torch
from torch import Tensor


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normally distributed, of unit variance."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_kv(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Random pages in the CPU's layout, seen as `[num_pages, 2, num_kv_heads, page_size, head_dim]`; page 0 is zero."""
    pages = random_tensor(2, num_kv_heads, num_pages, page_size, head_dim, dtype=dtype, seed=9)
    pages[:, :, 0] = 0
    return pages.permute(2, 0, 1, 3, 4)


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
