"""What both attention kernels ask of what they are called with. Each check raises a ValueError that names the tensor.

Shapes, dtypes, strides and devices are checked at every launch. Values are checked where that takes no copy from a
device: at the launch if the tensors lie on the CPU, and for a GPU when its work is built, from numpy
(`check_block_table`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.check import check_dtype, check_heads, check_shape
from sapwood_kernels.config_table import DTYPES, HEAD_DIMS, INTERPRETER_ARCH, MAX_GROUP, PAGE_SIZES
from sapwood_kernels.values import AttentionRule, PagedBatch

FP8 = torch.float8_e4m3fn
FP8_ARCH = 89
"""The first compute capability that converts e4m3."""


def check_attention(q: Tensor, kv: Tensor, batch: PagedBatch, rule: AttentionRule, arch: int) -> None:
    """What `check_paged` asks, and what the kernels are made for: dtypes, head dims, page sizes, groups and strides.

    kv is of q's dtype or e4m3; any strides, but 1 for head_dim. arch is a compute capability, 90 for 9.0, or
    INTERPRETER_ARCH.
    """
    check_dtype("q", q, tuple(DTYPES.values()))
    check_dtype("kv", kv, (q.dtype, FP8))
    if kv.dtype == FP8 and INTERPRETER_ARCH < arch < FP8_ARCH:
        raise ValueError(f"kv is {kv.dtype} on compute capability {arch}; accepted: {FP8_ARCH} or newer, or {q.dtype}")
    _check_tensors(q, kv, batch, rule)
    if not 0 < rule.scale < math.inf:
        raise ValueError(f"scale is {rule.scale}; accepted: a finite number over 0")
    for name, size, accepted in (("head_dim", kv.shape[4], HEAD_DIMS), ("page_size", kv.shape[3], PAGE_SIZES)):
        if size not in accepted:
            raise ValueError(f"kv has {name} {size}; accepted: {', '.join(map(str, accepted))}")
    group = q.shape[1] // kv.shape[2]
    if group > MAX_GROUP:
        raise ValueError(f"q has {group} heads to one of kv's {kv.shape[2]}; accepted: up to {MAX_GROUP}")
    check_last_strides(_tensors(q, kv, batch, rule))
    _check_values(q, kv, batch, rule)


def check_paged(q: Tensor, kv: Tensor, batch: PagedBatch, rule: AttentionRule) -> None:
    """Queries, pages, batch and rule fit each other, whatever the kernels are made for.

    q [num_tokens, num_heads, head_dim]; kv [num_pages, 2, num_kv_heads, page_size, head_dim].
    """
    _check_tensors(q, kv, batch, rule)
    _check_values(q, kv, batch, rule)


def check_last_strides(tensors: dict[str, Tensor]) -> None:
    """Elements along each tensor's last dimension lie side by side: kernels add indices to pointers there."""
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {list(tensor.stride())}; accepted: 1 for the last dimension")


def check_device(tensors: dict[str, Tensor], device: torch.device) -> None:
    """All tensors lie on `device`."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; accepted: {device}")


def check_block_table(
    block_table: npt.NDArray[np.int32],
    num_keys: npt.NDArray[np.int32],
    page_size: int,
    num_pages: int,
    first_key: npt.NDArray[np.int32] | None = None,
) -> None:
    """Every page that a sequence reads is in the pool and isn't page 0, which is reserved.

    block_table [num_sequences, max_pages]; num_keys [num_sequences], where the last key ends; first_key
    [num_sequences], the first key that a window leaves, None for no window. Entries outside are free to be anything.
    """
    if block_table.ndim != 2 or num_keys.shape != block_table.shape[:1]:
        raise ValueError(
            f"block_table has shape {list(block_table.shape)} and num_keys {list(num_keys.shape)}; accepted: "
            "[num_sequences, max_pages] and [num_sequences]"
        )
    room = block_table.shape[1] * page_size
    if num_keys.size and not 0 <= num_keys.min() <= num_keys.max() <= room:
        raise ValueError(
            f"num_keys holds {num_keys.min()} to {num_keys.max()}; accepted: 0 to {room}, "
            f"{block_table.shape[1]} pages of {page_size}"
        )
    column = np.arange(block_table.shape[1])
    read = column < -(-num_keys[:, None] // page_size)
    if first_key is not None:
        read &= column >= first_key[:, None] // page_size
    pages = block_table[read]
    if pages.size and not 1 <= pages.min() <= pages.max() < num_pages:
        raise ValueError(f"block_table holds {pages.min()} to {pages.max()}; accepted: 1 to {num_pages - 1}")


def _check_tensors(q: Tensor, kv: Tensor, batch: PagedBatch, rule: AttentionRule) -> None:
    check_shape("q", q, (None, None, None))
    check_shape("kv", kv, (None, 2, None, None, q.shape[2]))
    check_heads(q.shape[1], kv.shape[2])
    check_shape("block_table", batch.block_table, (None, None))
    num_sequences = batch.block_table.shape[0]
    check_shape("num_keys", batch.num_keys, (num_sequences,))
    check_shape("first_query", batch.first_query, (num_sequences + 1,))
    for name in ("block_table", "num_keys", "first_query"):
        check_dtype(name, getattr(batch, name), (torch.int32,))
    if rule.sinks is not None:
        check_shape("sinks", rule.sinks, (q.shape[1],))
        check_dtype("sinks", rule.sinks, (torch.float32,))
    check_device(_tensors(q, kv, batch, rule), q.device)


def _tensors(q: Tensor, kv: Tensor, batch: PagedBatch, rule: AttentionRule) -> dict[str, Tensor]:
    tensors = {
        "q": q,
        "kv": kv,
        "block_table": batch.block_table,
        "num_keys": batch.num_keys,
        "first_query": batch.first_query,
    }
    return tensors if rule.sinks is None else tensors | {"sinks": rule.sinks}


def _check_values(q: Tensor, kv: Tensor, batch: PagedBatch, rule: AttentionRule) -> None:
    if q.device.type != "cpu":
        return
    first_query, num_keys = batch.first_query.numpy(), batch.num_keys.numpy()
    if first_query[0] != 0 or first_query[-1] != q.shape[0] or (np.diff(first_query) < 0).any():
        raise ValueError(f"first_query is {first_query.tolist()}; accepted: ascending from 0 to q's rows, {q.shape[0]}")
    first_key = None
    if rule.window is not None:
        first_key = np.maximum(num_keys - np.diff(first_query) - rule.window + 1, 0)
    check_block_table(batch.block_table.numpy(), num_keys, kv.shape[3], kv.shape[0], first_key)
