"""What decode attention leaves for each split of a row's keys, until the splits are merged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_kernels.attention_check import check_device, check_last_strides
from sapwood_kernels.check import check_dtype, check_shape

MAX_BYTES = 8 * 2**30
"""Of one step's partials. 256 rows of 131,072 keys make 131,072 partials by splits of 256, which with 32 heads of 128
dimensions take 2.2e9 bytes: more than four times that is a mistake in a count."""


@dataclass(frozen=True, kw_only=True)
class Partials:
    """A row's attention over the keys of one split, once for each head: `DecodeWork.first_partial[row] + split` is its
    number. One buffer serves every layer of a step, and every step.

    Rows of few keys take few; an array `[rows, splits of the longest]` would give every row as many as the longest.
    """

    maximum: Tensor
    """fp32 [capacity, num_heads]: of the scores, in units of log 2."""
    total: Tensor
    """fp32 [capacity, num_heads]: the sum of `2 ** (score - maximum)`."""
    acc: Tensor
    """fp32 [capacity, num_heads, head_dim]: the sum of `2 ** (score - maximum) * value`."""


def allocate_partials(capacity: int, num_heads: int, head_dim: int, device: torch.device) -> Partials:
    """Room for `capacity` partials, not initialised. Raises ValueError if that takes more than MAX_BYTES."""
    for name, count in (("capacity", capacity), ("num_heads", num_heads), ("head_dim", head_dim)):
        if count < 1:
            raise ValueError(f"{name} is {count}; accepted: 1 or more")
    num_bytes = 4 * capacity * num_heads * (head_dim + 2)
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"{capacity} partials of {num_heads} heads of {head_dim} dimensions take {num_bytes} bytes; "
            f"accepted: up to {MAX_BYTES}"
        )
    sizes = torch.empty(2, capacity, num_heads, dtype=torch.float32, device=device)
    acc = torch.empty(capacity, num_heads, head_dim, dtype=torch.float32, device=device)
    return Partials(maximum=sizes[0], total=sizes[1], acc=acc)


def check_partials(partials: Partials, capacity: int, num_heads: int, head_dim: int, device: torch.device) -> None:
    """Room for `capacity` on `device`, and strides that kernels take. Raises ValueError that names the tensor."""
    if partials.acc.shape[0] < capacity:
        raise ValueError(f"partials.acc has room for {partials.acc.shape[0]}; accepted: {capacity} or more, the work's")
    capacity = partials.acc.shape[0]
    for name, tensor, shape in (
        ("partials.maximum", partials.maximum, (capacity, num_heads)),
        ("partials.total", partials.total, (capacity, num_heads)),
        ("partials.acc", partials.acc, (capacity, num_heads, head_dim)),
    ):
        check_dtype(name, tensor, (torch.float32,))
        check_shape(name, tensor, shape)
        check_last_strides({name: tensor})
        check_device({name: tensor}, device)
    if partials.maximum.stride() != partials.total.stride():
        raise ValueError(
            f"partials.total has strides {list(partials.total.stride())}; accepted: those of partials.maximum, "
            f"{list(partials.maximum.stride())}"
        )
