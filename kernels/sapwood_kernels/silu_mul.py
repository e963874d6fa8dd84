"""SwiGLU's gate: `silu(gate) * up` (Shazeer, 2020)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention_check import check_last_strides
from sapwood_kernels.check import FLOAT_DTYPES, check_dtype, check_shape

_BLOCK = 1024
"""Elements of a program: 8 a thread, as many as one load of 16 bytes of bf16 brings. A guess, to be measured."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """`gate * sigmoid(gate) * up`, in fp32.

    gate_up [num_tokens, 2 * size], gates first, of any row stride -> [num_tokens, size], like gate_up, contiguous.
    Raises ValueError for other shapes, dtypes and strides, before anything is launched.
    """
    check_shape("gate_up", gate_up, (None, None))
    check_dtype("gate_up", gate_up, FLOAT_DTYPES)
    num_tokens, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"gate_up has {columns} columns; accepted: an even number, gates then ups")
    check_last_strides({"gate_up": gate_up})
    size = columns // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    _silu_mul[(num_tokens, triton.cdiv(size, _BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        size,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, stride: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """See `silu_mul`. Grid: (tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    row = gate_up + token * stride + columns
    gate = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + size, mask=inside, other=0.0).to(tl.float32)
    # Of minus the absolute value, so that it can't overflow.
    grown = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate < 0, grown, 1.0) / (1 + grown)
    result = gate * sigmoid * up
    tl.store(out + token * size + columns, result.to(out.dtype.element_ty), mask=inside)
