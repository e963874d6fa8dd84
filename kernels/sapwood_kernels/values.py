"""What ops take besides tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_kernels.check import check_indices


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms over each query and key head, before the rotation (Qwen3)."""

    query: Tensor
    """fp32 [head_dim]."""
    key: Tensor
    """fp32 [head_dim]."""
    eps: float


@dataclass(frozen=True)
class PagedSequence:
    """Some consecutive queries of one sequence, the last ones of its `num_keys` tokens, and where its KV lies.

    Query `i` of `n` sees the keys at positions `[0, num_keys - n + 1 + i)`. Planned once a step, used by every layer.
    """

    first_query: int
    """Row of the step's `q` that holds query 0."""
    num_queries: int
    pages: Tensor
    """int64 [ceil(num_keys / page_size)]."""
    num_keys: int
    mask: Tensor | None
    """The same rule as a bias to add to scores, [num_queries, num_keys], 0 or -inf; None where causality itself says
    it: one query that sees everything, or as many queries as keys."""


def plan_sequence(
    first_query: int, num_queries: int, pages: Tensor, num_keys: int, dtype: torch.dtype
) -> PagedSequence:
    """A PagedSequence with its mask in `dtype`. Raises ValueError if the counts can't be."""
    if not 0 < num_queries <= num_keys:
        raise ValueError(f"num_queries is {num_queries}; accepted: 1 to num_keys, {num_keys}")
    check_indices("pages", pages, 1, 2**31)
    mask = None
    if 1 < num_queries < num_keys:
        mask = torch.full((num_queries, num_keys), float("-inf"), dtype=dtype)
        mask.triu_(num_keys - num_queries + 1)
    return PagedSequence(first_query, num_queries, pages, num_keys, mask)
