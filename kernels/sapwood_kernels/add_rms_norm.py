"""RMS norm of each token, alone and together with the residual sum before it (Zhang and Sennrich, 2019).

One program computes one token in one block, so a token's bits don't depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention_check import check_device, check_last_strides
from sapwood_kernels.check import FLOAT_DTYPES, check_dtype, check_shape

MAX_HIDDEN = 65536
"""What one program can hold; the largest models have a quarter of it."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension, in fp32.

    x [num_tokens, hidden] of any row stride, weight fp32 [hidden] -> [num_tokens, hidden] of `dtype`, contiguous.
    Raises ValueError for other shapes, dtypes and strides, before anything is launched.
    """
    _check(x, weight)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, FLOAT_DTYPES))}")
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place, and returns the RMS norm of the sum, written over x.

    x [num_tokens, hidden], residual fp32 [num_tokens, hidden], both of any row stride, weight fp32 [hidden] -> x.
    Raises ValueError for other shapes, dtypes and strides, before anything is launched.
    """
    _check(x, weight)
    check_shape("residual", residual, x.shape)
    check_dtype("residual", residual, (torch.float32,))
    check_last_strides({"residual": residual})
    check_device({"residual": residual}, x.device)
    _launch(x, residual, weight, eps, x)
    return x


def _check(x: Tensor, weight: Tensor) -> None:
    check_shape("x", x, (None, None))
    check_dtype("x", x, FLOAT_DTYPES)
    if not 1 <= x.shape[1] <= MAX_HIDDEN:
        raise ValueError(f"x has shape {list(x.shape)}; accepted: 1 to {MAX_HIDDEN} columns")
    check_shape("weight", weight, (x.shape[1],))
    check_dtype("weight", weight, (torch.float32,))
    check_last_strides({"x": x, "weight": weight})
    check_device({"weight": weight}, x.device)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    num_tokens, hidden = x.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(hidden)
    _add_rms_norm[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        # 8 elements a thread, as many as one load of 16 bytes of bf16 brings. A guess, to be measured on a GPU.
        num_warps=min(max(block // 256, 1), 16),
        enable_fp_fusion=False,
    )


@triton.jit
def _add_rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """See `add_rms_norm`; without a residual, `rms_norm`. Grid: (tokens). out may be x."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    row = tl.load(x + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        where = residual + token * residual_stride + columns
        row += tl.load(where, mask=inside, other=0.0)
        tl.store(where, row, mask=inside)
    factor = 1 / tl.sqrt_rn(tl.sum(row * row) / HIDDEN + eps)
    result = row * factor * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + token * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)
