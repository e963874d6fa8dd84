"""A weight matrix in the forms that kernels want: dense, and as the checkpoint's own quantised integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32
"""Columns that share one scale in Q4_0, Q4_1 and Q8_0."""


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
class PackedQ8:
    """Q8_0, exactly: `weight[n, k] = quants[n, k] * scale[n, k // 32]` in fp32."""

    quants: Tensor
    """int8 [N, K]."""
    scale: Tensor
    """fp32 [N, K / 32]."""


@dataclass(frozen=True)
class Matrix:
    """Weights of one linear, possibly of several merged along their rows. `y = x @ dense.T`."""

    dense: Tensor
    """[N, K] in the dtype that was asked for."""
    packed: PackedQ4 | None = None
    """If asked for, and every merged part is Q4_0 or Q4_1."""
    int8: PackedQ8 | None = None
    """If asked for, and every merged part is Q8_0."""


def merge_packed(parts: list[PackedQ4 | PackedQ8 | None]) -> tuple[PackedQ4 | None, PackedQ8 | None]:
    """The parts' rows one below the other, where all are of one kind; else nothing of either kind."""
    q4 = [part for part in parts if isinstance(part, PackedQ4)]
    q8 = [part for part in parts if isinstance(part, PackedQ8)]
    if len(q4) == len(parts):
        quants, scale, minimum = (
            _below([getattr(part, name) for part in q4]) for name in ("quants", "scale", "minimum")
        )
        return PackedQ4(quants, scale, minimum), None
    if len(q8) == len(parts):
        quants, scale = (_below([getattr(part, name) for part in q8]) for name in ("quants", "scale"))
        return None, PackedQ8(quants, scale)
    return None, None


def _below(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
