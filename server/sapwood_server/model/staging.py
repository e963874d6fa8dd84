"""From numpy to a device without waiting for it.

A GPU copies asynchronously only from pinned memory. It comes from torch's host allocator, which hands a block out again
only once the copy that reads it has run: so no step ever waits for its predecessor's inputs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def stage(buffer: Tensor, values: npt.NDArray[np.generic]) -> Tensor:
    """Copies `values` to the leading corner of `buffer`, of the same dtype and number of dimensions, and returns that
    view. ValueError if it does not fit."""
    source = torch.from_numpy(values)
    fits = source.dim() == buffer.dim() and all(
        size <= room for size, room in zip(source.shape, buffer.shape, strict=True)
    )
    if not fits or source.dtype != buffer.dtype:
        raise ValueError(
            f"values are {source.dtype} {list(source.shape)}; accepted: {buffer.dtype}, at most {list(buffer.shape)}"
        )
    view = buffer[tuple(slice(size) for size in source.shape)]
    view.copy_(_pinned(source) if buffer.is_cuda else source, non_blocking=True)
    return view


def stage_new(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """`values` as a new tensor on the device."""
    source = torch.from_numpy(values)
    if device.type == "cuda":
        return _pinned(source).to(device, non_blocking=True)
    return source


def fetch(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors on the CPU, once everything that was ordered before has run: the one wait of a step."""
    if not any(tensor.is_cuda for tensor in tensors):
        return tensors
    fetched = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors)
    for target, tensor in zip(fetched, tensors, strict=True):
        target.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return fetched


def _pinned(source: Tensor) -> Tensor:
    """A pinned copy; there is no memory to pin for a tensor without elements."""
    return source.pin_memory() if source.numel() else source
