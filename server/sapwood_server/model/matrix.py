"""A weight matrix in the forms that kernels want: dense, and as the checkpoint's own quantised integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Columns that share one scale in Q4_0 and Q4_1."""


@dataclass(frozen=True)
class PackedQ4:
    """Q4_0 or Q4_1, exactly: `weight[n, k] = quants[n, k] * scale[n, k // 32] + minimum[n, k // 32]` in fp32."""

    quants: Tensor
    """uint8 [N, K], values 0 to 15."""
    scale: Tensor
    """fp32 [N, K / 32]."""
    minimum: Tensor
    """fp32 [N, K / 32]. Q4_0's is -8 * scale."""


@dataclass(frozen=True)
class Matrix:
    """Weights of one linear, possibly of several merged along their rows. `y = x @ dense.T`."""

    dense: Tensor
    """[N, K] in the dtype that was asked for."""
    packed: PackedQ4 | None = None
    """If asked for, and every merged part is Q4_0 or Q4_1."""


def merge_packed(parts: Sequence[PackedQ4 | None]) -> PackedQ4 | None:
    """The parts' rows one below the other; None if a part has no packed form."""
    packed = [part for part in parts if part is not None]
    if len(packed) < len(parts):
        return None
    if len(packed) == 1:
        return packed[0]
    quants, scale, minimum = (
        torch.cat([getattr(part, name) for part in packed]) for name in ("quants", "scale", "minimum")
    )
    return PackedQ4(quants, scale, minimum)
