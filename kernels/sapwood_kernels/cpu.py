"""The fast CPU forms of the ops in `reference`: few torch calls each, for a call costs as much as a small op's work.

Tuned on 2 cores with AVX512-BF16 and torch 2.13. They check what costs nothing to check; what a step's plan holds was
checked when it was made.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from sapwood_kernels.reference import count_heads
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, HeadNorms, KVScales, PagedBatch, PagedSequence


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `reference.rms_norm`. x is fp32."""
    return _normalised(x, weight, eps, torch.empty(x.shape, dtype=dtype))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.add_rms_norm`. The result is written over x."""
    residual.add_(x)
    return _normalised(residual, weight, eps, x)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`."""
    gate, up = gate_up.view(gate_up.shape[0], 2, -1).unbind(1)
    return functional.silu(gate).mul_(up)


def rope_kv_store(
    qkv: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv: Tensor,
    head_norms: HeadNorms | None,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """See `reference.rope_kv_store`. kv's strides are those of `[2, num_kv_heads, num_pages, page_size, head_dim]`;
    every token has a slot."""
    check_scales(scales)
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    num_heads = count_heads(qkv, num_kv_heads, head_dim)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    rotating = heads[:, : num_heads + num_kv_heads].to(torch.float32, copy=head_norms is not None)
    if head_norms is not None:
        norm_heads(rotating, num_heads, head_norms)
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = rotating.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    new = torch.cat((turned[:, num_heads:], heads[:, num_heads + num_kv_heads :]), dim=1).to(kv.dtype)
    slots_of_heads = pages_of_heads(kv).view(2 * num_kv_heads, -1, head_dim)
    slots_of_heads.index_copy_(1, slots, new.transpose(0, 1))
    return turned[:, :num_heads]


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    work: Sequence[PagedSequence],
    rule: AttentionRule,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """See `reference_attention.paged_prefill`: pages gathered side by side, then torch's flash attention.

    Decode rows without a dense copy take it as well.
    """
    check_rule(rule)
    check_scales(scales)
    num_kv_heads = kv.shape[2]
    pages = pages_of_heads(kv)
    out = torch.empty_like(q)
    for sequence in work:
        rows = slice(sequence.first_query, sequence.first_query + sequence.num_queries)
        tokens = pages.index_select(1, sequence.pages).flatten(1, 2)[:, : sequence.num_keys]
        out[rows] = functional.scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0),
            tokens[:num_kv_heads].unsqueeze(0),
            tokens[num_kv_heads:].unsqueeze(0),
            attn_mask=sequence.mask,
            is_causal=sequence.mask is None and sequence.num_queries > 1,
            scale=rule.scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out


def rotate(x: Tensor, rotations: Tensor, out: Tensor) -> None:
    """See `reference.rotate`: one call, where cosines and sines take six."""
    torch.bmm(x, rotations, out=out)


def dense_decode(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """See `reference.dense_decode`. A group's heads go in as if they were queries of one head: none sees more than
    another, and a head's keys are read once."""
    return functional.scaled_dot_product_attention(q, keys, values, scale=scale)


def norm_heads(heads: Tensor, num_heads: int, head_norms: HeadNorms) -> None:
    """See `reference.norm_heads`."""
    head_dim = heads.shape[2]
    squares = torch.linalg.vector_norm(heads, dim=-1, keepdim=True).square_()
    heads.mul_(squares.div_(head_dim).add_(head_norms.eps).rsqrt_())
    heads[:, :num_heads].mul_(head_norms.query)
    heads[:, num_heads:].mul_(head_norms.key)


def pages_of_heads(kv: Tensor) -> Tensor:
    """`[2 * num_kv_heads, num_pages, page_size, head_dim]`: a view. A layout that needs a copy for it is refused by
    torch, here or where pages are viewed as slots."""
    return kv.permute(1, 2, 0, 3, 4).view(2 * kv.shape[2], kv.shape[0], kv.shape[3], kv.shape[4])


def check_rule(rule: AttentionRule) -> None:
    """Raises ValueError for a rule that the CPU's ops don't compute: they know a scale and causality."""
    for name, value in (("window", rule.window), ("softcap", rule.softcap), ("sinks", rule.sinks)):
        if value is not None:
            raise ValueError(f"{name} is {value}; accepted on the CPU: None")


def check_scales(scales: KVScales) -> None:
    """Raises ValueError for scales: they are for pages of 8 bits, which the CPU has none of."""
    if scales != UNIT_SCALES:
        raise ValueError(f"scales are {scales}; accepted on the CPU: {UNIT_SCALES}")


def _normalised(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """RMS norm of x into `out`, which may have another dtype. One token takes two calls (4 us, torch's rms_norm 11):
    its factor is a Python float."""
    if x.shape[0] == 1:
        row = x[0]
        factor = (float(torch.dot(row, row)) / x.shape[1] + eps) ** -0.5
        return torch.addcmul(_zero(), x, weight, value=factor, out=out)
    factors = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[1]).add_(eps).rsqrt_()
    return torch.mul(x * factors, weight, out=out)


@functools.cache
def _zero() -> Tensor:
    return torch.zeros(1)
