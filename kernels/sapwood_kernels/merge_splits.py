"""A row's attention over all its keys, from its partials over each split."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention_check import check_device, check_last_strides
from sapwood_kernels.check import FLOAT_DTYPES, check_dtype, check_shape
from sapwood_kernels.decode_work import DecodeWork, check_lists
from sapwood_kernels.fold import LOG2_E, fold
from sapwood_kernels.partials import Partials, check_partials
from sapwood_kernels.values import AttentionRule


def merge_splits(
    partials: Partials, num_keys: Tensor, work: DecodeWork, rule: AttentionRule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention of each row and the logarithm of its sum of exponentials.

    num_keys int32 [num_rows], partials as `paged_decode` left them for the same work and rule -> out [num_rows,
    num_heads, head_dim] of `dtype`, and fp32 [num_rows, num_heads]: `log(sum(exp(scores)))`, a natural logarithm, over
    the keys a row sees and the sink of its head. A row without keys gives zeros and minus infinity.

    A left fold over the splits in ascending order, the sink first: see `fold.fold`.
    """
    num_heads, head_dim = partials.acc.shape[1], partials.acc.shape[2]
    device = num_keys.device
    check_partials(partials, work.layout.capacity, num_heads, head_dim, device)
    check_shape("num_keys", num_keys, (None,))
    check_dtype("num_keys", num_keys, (torch.int32,))
    check_lists(work, num_keys.shape[0], rule, device)
    tensors = {"num_keys": num_keys}
    if rule.sinks is not None:
        check_shape("sinks", rule.sinks, (num_heads,))
        check_dtype("sinks", rule.sinks, (torch.float32,))
        tensors["sinks"] = rule.sinks
    check_last_strides(tensors)
    check_device(tensors, device)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, FLOAT_DTYPES))}")
    num_rows = num_keys.shape[0]
    out = torch.empty(num_rows, num_heads, head_dim, dtype=dtype, device=device)
    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=device)
    _merge_splits[(num_rows, num_heads)](
        partials.maximum,
        partials.total,
        partials.acc,
        num_keys,
        work.first_partial,
        rule.sinks,
        out,
        lse,
        *(partials.maximum.stride(0), partials.acc.stride(0), partials.acc.stride(1)),
        num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        SPLIT_SIZE=work.layout.config.split_size,
        WINDOW=rule.window or 0,
        LOG2_E=LOG2_E,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out, lse


@triton.jit
def _merge_splits(
    partial_maximum: tl.tensor,
    partial_total: tl.tensor,
    partial_acc: tl.tensor,
    num_keys: tl.tensor,
    first_partial: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    maximum_stride: tl.tensor,
    acc_stride: tl.tensor,
    acc_head_stride: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    LOG2_E: tl.constexpr,
) -> None:
    """See `merge_splits`. Grid: (rows, heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    keys = tl.load(num_keys + row)
    number = tl.load(first_partial + row).to(tl.int64)
    first_split = tl.maximum(keys - WINDOW, 0) // SPLIT_SIZE if WINDOW else 0
    if sinks is None:
        maximum = tl.full([], float("-inf"), tl.float32)
        total = tl.full([], 0.0, tl.float32)
    else:
        maximum = tl.load(sinks + head) * LOG2_E
        total = tl.full([], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for split in tl.range(first_split, tl.cdiv(keys, SPLIT_SIZE), num_stages=8):
        where = (number + split) * maximum_stride + head
        where_acc = (number + split) * acc_stride + head * acc_head_stride + dims
        maximum, total, acc = fold(
            maximum,
            total,
            acc,
            tl.load(partial_maximum + where),
            tl.load(partial_total + where),
            tl.load(partial_acc + where_acc, mask=in_head, other=0.0),
        )
    # A row of padding: its sum may be 0.
    empty = keys == 0
    total = tl.where(empty, 1.0, total)
    result = tl.where(empty, 0.0, acc / total)
    tl.store(out + (row * num_heads + head) * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=in_head)
    natural = tl.where(empty, float("-inf"), (maximum + tl.log2(total)) / LOG2_E)
    tl.store(lse + row * num_heads + head, natural)
