"""Checks that kernels make of what they are called with. Each raises a ValueError that names the tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KV_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn)
INDEX_DTYPES = (torch.int64,)


def check_shape(name: str, tensor: Tensor, expected: Sequence[int | None]) -> None:
    """`tensor` has the `expected` sizes; None accepts any size."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(expected) and all(
        want is None or size == want for size, want in zip(shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise ValueError(f"{name} has shape {list(shape)}; accepted: [{wanted}]")


def check_dtype(name: str, tensor: Tensor, accepted: Sequence[torch.dtype]) -> None:
    """`tensor` is of one of the `accepted` dtypes."""
    if tensor.dtype not in accepted:
        raise ValueError(f"{name} is {tensor.dtype}; accepted: {', '.join(map(str, accepted))}")


def check_indices(name: str, indices: Tensor, low: int, high: int) -> None:
    """Every element of the int64 tensor `indices` is in `[low, high)`."""
    check_dtype(name, indices, INDEX_DTYPES)
    if indices.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in torch.aminmax(indices))
    if smallest < low or largest >= high:
        raise ValueError(f"{name} holds {smallest} to {largest}; accepted: {low} to {high - 1}")


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Every key-value head serves the same number of query heads."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads over {num_kv_heads} key-value heads; accepted: a multiple of them")


def check_kv(kv: Tensor) -> None:
    """`kv` is one layer's pages, `[num_pages, 2, num_kv_heads, page_size, head_dim]`."""
    check_shape("kv", kv, (None, 2, None, None, None))
    check_dtype("kv", kv, KV_DTYPES)
