"""What Triton's interpreter, which runs kernels on the CPU without a GPU, cannot do."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

_RIGHT_IN_INTERPRETER = (torch.float16, torch.float32)


def must_upcast(*tensors: Tensor) -> bool:
    """Whether a kernel must load these tensors as fp32 before it multiplies them: in the interpreter, for other dtypes
    than fp16 and fp32.

    It multiplies bf16 bit patterns as if they were integers (errors of 1e10) and knows no arithmetic in 8 bits; loads
    and conversions to fp32 are right. Conversions from fp32 to bf16 cut off the lower bits: one unit in the last place.
    """
    return triton.knobs.runtime.interpret and any(tensor.dtype not in _RIGHT_IN_INTERPRETER for tensor in tensors)
