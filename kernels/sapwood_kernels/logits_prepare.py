"""Logits made ready to draw from, in place: edits of single tokens, then a grammar's mask and the vocabulary's tail."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention_check import check_device, check_last_strides
from sapwood_kernels.check import check_dtype, check_shape
from sapwood_kernels.logit_edits import LogitEdits, check_logit_edits

_EDIT_BLOCK = 256
_MASK_BLOCK = 2048
"""Tokens of a program. Both are guesses, to be measured on a GPU."""


def logits_prepare(
    logits: Tensor,
    num_tokens: int,
    edits: LogitEdits | None = None,
    bitmask: Tensor | None = None,
    bitmask_rows: Tensor | None = None,
) -> None:
    """In this order: bias added; repetition penalty of tokens in prompt or output (positive logits divided, others
    multiplied; Keskar et al., 2019); presence and frequency penalties of tokens in the output subtracted (once and per
    occurrence); minus infinity for banned ids, for what the bitmask forbids and for ids from `num_tokens` on.

    logits fp32 [R, V] of any row stride, 1 <= num_tokens <= V. bitmask int32 [M, at least ceil(num_tokens / 32)]: bit
    `id % 32` of word `id // 32` allows a token (XGrammar's and llguidance's format). bitmask_rows int32 [R]: the row of
    the bitmask for each row of logits, -1 for none. A row's result depends on that row alone.

    The temperature is left to `sample`: divided by it first, logits that differ may become equal or infinite.

    Raises ValueError for what can't be, before anything is launched; values are looked at if they lie on the CPU.
    """
    _check(logits, num_tokens, bitmask, bitmask_rows)
    if edits is not None:
        check_logit_edits(edits, logits, num_tokens)
    if logits.shape[0] == 0:
        return
    if edits is not None and edits.longest:
        _launch_edits(logits, edits)
    if bitmask is not None or num_tokens < logits.shape[1]:
        _launch_mask(logits, num_tokens, bitmask, bitmask_rows)


def _launch_edits(logits: Tensor, edits: LogitEdits) -> None:
    _edit_logits[(logits.shape[0], triton.cdiv(edits.longest, _EDIT_BLOCK))](
        logits,
        edits.first,
        edits.ids,
        edits.counts,
        edits.bias,
        edits.penalties,
        logits.stride(0),
        BLOCK=_EDIT_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _launch_mask(logits: Tensor, num_tokens: int, bitmask: Tensor | None, bitmask_rows: Tensor | None) -> None:
    num_rows, size = logits.shape
    # Without a bitmask there is only the tail to hide.
    first_block = num_tokens // _MASK_BLOCK if bitmask is None else 0
    _mask_logits[(num_rows, triton.cdiv(size, _MASK_BLOCK) - first_block)](
        logits,
        bitmask,
        bitmask_rows,
        logits.stride(0),
        0 if bitmask is None else bitmask.stride(0),
        first_block,
        num_tokens,
        size,
        BLOCK=_MASK_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _check(logits: Tensor, num_tokens: int, bitmask: Tensor | None, bitmask_rows: Tensor | None) -> None:
    check_shape("logits", logits, (None, None))
    check_dtype("logits", logits, (torch.float32,))
    check_last_strides({"logits": logits})
    if not 1 <= num_tokens <= logits.shape[1]:
        raise ValueError(f"num_tokens is {num_tokens}; accepted: 1 to the logits' columns, {logits.shape[1]}")
    if bitmask is None and bitmask_rows is None:
        return
    if bitmask is None or bitmask_rows is None:
        raise ValueError("bitmask and bitmask_rows are given one without the other; accepted: both or neither")
    check_shape("bitmask", bitmask, (None, None))
    if bitmask.shape[1] < -(-num_tokens // 32):
        raise ValueError(f"bitmask has {bitmask.shape[1]} columns; accepted: {-(-num_tokens // 32)} or more")
    check_shape("bitmask_rows", bitmask_rows, (logits.shape[0],))
    masks = {"bitmask": bitmask, "bitmask_rows": bitmask_rows}
    for name, tensor in masks.items():
        check_dtype(name, tensor, (torch.int32,))
    check_last_strides(masks)
    check_device(masks, logits.device)
    if logits.device.type == "cpu" and bitmask_rows.numel():
        smallest, largest = (int(bound) for bound in torch.aminmax(bitmask_rows))
        if smallest < -1 or largest >= bitmask.shape[0]:
            raise ValueError(f"bitmask_rows holds {smallest} to {largest}; accepted: -1 to {bitmask.shape[0] - 1}")


@triton.jit
def _edit_logits(
    logits: tl.tensor,
    first: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    bias: tl.tensor,
    penalties: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The edits of `logits_prepare`. Grid: (rows, blocks of edits)."""
    row = tl.program_id(0).to(tl.int64)
    edit = tl.load(first + row) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = edit < tl.load(first + row + 1)
    where = logits + row * stride + tl.load(ids + edit, mask=inside, other=0).to(tl.int64)
    count = tl.load(counts + edit, mask=inside, other=0)
    added = tl.load(bias + edit, mask=inside, other=0.0)
    repetition = tl.load(penalties + 3 * row)
    presence = tl.load(penalties + 3 * row + 1)
    frequency = tl.load(penalties + 3 * row + 2)

    banned = added == float("-inf")
    x = tl.load(where, mask=inside, other=0.0) + tl.where(banned, 0.0, added)
    # Division as IEEE 754 rounds it, so that the result has the bits of the CPU's.
    repeated = tl.where(x > 0, tl.div_rn(x, tl.broadcast_to(repetition, x.shape)), x * repetition)
    x = tl.where(count >= 0, repeated, x)
    x = tl.where(count > 0, x - presence, x)
    x = tl.where(count > 0, x - frequency * count.to(tl.float32), x)
    tl.store(where, tl.where(banned, float("-inf"), x), mask=inside)


@triton.jit
def _mask_logits(
    logits: tl.tensor,
    bitmask: tl.tensor,
    bitmask_rows: tl.tensor,
    stride: tl.tensor,
    bitmask_stride: tl.tensor,
    first_block: tl.tensor,
    num_tokens: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Minus infinity for what is hidden; nothing is read of the logits. Grid: (rows, blocks of tokens)."""
    row = tl.program_id(0).to(tl.int64)
    word = (first_block + tl.program_id(1)) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    bit = tl.arange(0, 32)
    token = word[:, None] * 32 + bit[None, :]
    hidden = token >= num_tokens
    if bitmask is not None:
        mask_row = tl.load(bitmask_rows + row).to(tl.int64)
        has_word = (mask_row >= 0) & (word < tl.cdiv(num_tokens, 32))
        # -1 has all bits set: a row without a mask, and what lies behind the mask, hides nothing here.
        allowed = tl.load(bitmask + mask_row * bitmask_stride + word, mask=has_word, other=-1)
        hidden = hidden | (((allowed[:, None] >> bit[None, :]) & 1) == 0)
    where = logits + row * stride + token
    tl.store(where, tl.full([BLOCK // 32, 32], float("-inf"), tl.float32), mask=hidden & (token < size))
