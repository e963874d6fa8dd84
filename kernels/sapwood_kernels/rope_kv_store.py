"""Between the projection of queries, keys and values and attention: heads are normed, rotated and stored, in one pass.

A program takes some heads of one token, whichever they are: it rotates all it has and keeps values as they were. So a
token's bits don't depend on the others, nor on where it is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention_check import FP8, FP8_ARCH, check_device, check_last_strides
from sapwood_kernels.check import check_dtype, check_indices, check_kv, check_shape
from sapwood_kernels.reference import count_heads
from sapwood_kernels.values import UNIT_SCALES, HeadNorms, KVScales

MAX_HEAD_DIM = 256
_BLOCK = 512
"""Elements of half-heads of a program: 8 a thread, as many as one load of 16 bytes of bf16 brings. A guess, to be
measured on a GPU."""


def rope_kv_store(
    qkv: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv: Tensor,
    head_norms: HeadNorms | None,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """Norms heads (if asked to), rotates queries and keys, stores keys and values; returns the queries.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], query, key, value heads in this order. cos_sin fp32
    [num_tokens, head_dim]: cosines then sines of each token's angles; element i turns with element i + head_dim / 2
    (Su et al., 2021, half-split). kv [num_pages, 2, num_kv_heads, page_size, head_dim], of a float dtype or e4m3, any
    strides but 1 for head_dim. slots int64 [num_tokens], distinct; a token of slot -1 is not stored. What is stored was
    divided by its scale, and e4m3 saturates. -> q [num_tokens, num_heads, head_dim], like qkv, contiguous.

    Raises ValueError for what can't be, before anything is launched. Slots are looked at if they lie on the CPU; on a
    GPU a slot in page 0, which is reserved, or outside the pool is not stored either.
    """
    num_heads = _check(qkv, cos_sin, slots, kv, head_norms)
    q = torch.empty(qkv.shape[0], num_heads, kv.shape[4], dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0]:
        _launch(qkv, cos_sin, slots, kv, head_norms, scales, q)
    return q


def _launch(
    qkv: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv: Tensor,
    head_norms: HeadNorms | None,
    scales: KVScales,
    q: Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_pages, _, num_kv_heads, page_size, _ = kv.shape
    padded_half = triton.next_power_of_2(head_dim // 2)
    block_heads = max(_BLOCK // padded_half, 1)
    _rope_kv_store[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, block_heads))](
        qkv,
        cos_sin,
        slots,
        kv,
        q,
        None if head_norms is None else head_norms.query,
        None if head_norms is None else head_norms.key,
        0.0 if head_norms is None else head_norms.eps,
        scales.key,
        scales.value,
        num_pages * page_size,
        qkv.stride(0),
        cos_sin.stride(0),
        *kv.stride()[:4],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_SIZE=page_size,
        HALF=head_dim // 2,
        PADDED_HALF=padded_half,
        BLOCK_HEADS=block_heads,
        SCALED=scales != UNIT_SCALES,
        num_warps=2,
        # Else ptxas aims at 40 for sm_90, and spills; with 64, blocks of 2 warps still fill an SM's registers.
        maxnreg=64,
        enable_fp_fusion=False,
    )


def _check(qkv: Tensor, cos_sin: Tensor, slots: Tensor, kv: Tensor, head_norms: HeadNorms | None) -> int:
    """The number of query heads, once all tensors fit each other."""
    check_kv(kv)
    num_pages, _, num_kv_heads, page_size, head_dim = kv.shape
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"kv has head_dim {head_dim}; accepted: an even number from 2 to {MAX_HEAD_DIM}")
    num_heads = count_heads(qkv, num_kv_heads, head_dim)
    check_shape("cos_sin", cos_sin, (qkv.shape[0], head_dim))
    check_dtype("cos_sin", cos_sin, (torch.float32,))
    check_shape("slots", slots, (qkv.shape[0],))
    check_dtype("slots", slots, (torch.int64,))
    tensors = {"qkv": qkv, "cos_sin": cos_sin, "slots": slots, "kv": kv}
    if head_norms is not None:
        tensors |= {"query norm": head_norms.query, "key norm": head_norms.key}
        for name in ("query norm", "key norm"):
            check_shape(name, tensors[name], (head_dim,))
            check_dtype(name, tensors[name], (torch.float32,))
    check_last_strides(tensors)
    check_device(tensors, qkv.device)
    if kv.dtype == FP8:
        _check_fp8(kv)
    if slots.device.type == "cpu":
        check_indices("slots", slots[slots != -1], page_size, num_pages * page_size)
    return num_heads


def _check_fp8(kv: Tensor) -> None:
    """As attention does, which reads what is stored here. The interpreter has no architecture."""
    if triton.knobs.runtime.interpret:
        return
    arch = triton.runtime.driver.active.get_current_target().arch
    if arch < FP8_ARCH:
        raise ValueError(f"kv is {kv.dtype} on compute capability {arch}; accepted: {FP8_ARCH} or newer")


@triton.jit
def _rope_kv_store(
    qkv: tl.tensor,
    cos_sin: tl.tensor,
    slots: tl.tensor,
    kv: tl.tensor,
    q: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    num_slots: tl.tensor,
    qkv_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    page_stride: tl.tensor,
    kind_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """See `rope_kv_store`. Grid: (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    dims = tl.arange(0, PADDED_HALF)[None, :]
    in_half = dims < HALF
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & in_half
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS

    heads = qkv + token * qkv_stride + head * (2 * HALF) + dims
    first = tl.load(heads, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_first, turned_second = first, second
    if query_norm is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = (1 / tl.sqrt_rn(squares / (2 * HALF) + eps))[:, None]
        turned_first = first * factor * _norm_weight(query_norm, key_norm, dims, in_half, is_query)
        turned_second = second * factor * _norm_weight(query_norm + HALF, key_norm + HALF, dims, in_half, is_query)
    angles = cos_sin + token * cos_sin_stride + dims
    cos = tl.load(angles, mask=in_half, other=0.0)
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)
    rotated_first = turned_first * cos - turned_second * sin
    rotated_second = turned_second * cos + turned_first * sin

    out = q + (token * NUM_HEADS + head) * (2 * HALF) + dims
    tl.store(out, rotated_first.to(q.dtype.element_ty), mask=inside & is_query)
    tl.store(out + HALF, rotated_second.to(q.dtype.element_ty), mask=inside & is_query)

    slot = tl.load(slots + token)
    has_slot = (slot >= PAGE_SIZE) & (slot < num_slots)
    stored = inside & (head >= NUM_HEADS) & has_slot
    new_first = tl.where(is_value, first, rotated_first)
    new_second = tl.where(is_value, second, rotated_second)
    if SCALED:
        scale = tl.where(is_value, value_scale, key_scale)
        new_first = tl.div_rn(new_first, tl.broadcast_to(scale, new_first.shape))
        new_second = tl.div_rn(new_second, tl.broadcast_to(scale, new_second.shape))
    kv_head = tl.where(is_value, head - NUM_KV_HEADS, head) - NUM_HEADS
    where = kv + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride
    where = where + is_value.to(tl.int64) * kind_stride + kv_head.to(tl.int64) * kv_head_stride + dims
    tl.store(where, _converted(new_first, kv.dtype.element_ty), mask=stored)
    tl.store(where + HALF, _converted(new_second, kv.dtype.element_ty), mask=stored)


@triton.jit
def _norm_weight(
    query_norm: tl.tensor, key_norm: tl.tensor, dims: tl.tensor, in_half: tl.tensor, is_query: tl.tensor
) -> tl.tensor:
    """The weights of each head, [heads, dims]."""
    query = tl.load(query_norm + dims, mask=in_half, other=0.0)
    key = tl.load(key_norm + dims, mask=in_half, other=0.0)
    return tl.where(is_query, query, key)


@triton.jit
def _converted(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """fp32 in another dtype.

    For e4m3 its bits are made here, from the exponent and the upper 3 bits of the mantissa, rounded to even, or under
    2^-6 as a multiple of 2^-9. Largest is 448, number 126, at which it saturates; 127 is NaN. Triton's interpreter
    cuts off what it should round, so with its conversion no test could tell what a GPU stores.
    """
    if dtype == tl.float8e4nv:
        magnitude = tl.abs(x)
        bits = magnitude.to(tl.int32, bitcast=True)
        # Exponents are biased by 127 there and by 7 here.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (127 - 7) * 8
        # From 2^14 (0x46800000) on, neighbours in fp32 lie 2^-9 apart.
        subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        number = tl.minimum(tl.where(magnitude < 0.015625, subnormal, normal), 126)
        number = tl.where(x != x, 127, number)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        return (number | sign).to(tl.uint8).to(dtype, bitcast=True)
    else:
        return x.to(dtype)
