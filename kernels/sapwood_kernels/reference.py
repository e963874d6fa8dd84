"""Ops as plain formulas in fp32: the oracle. Never tuned. The fast forms of an op have the same signature.

Attention over pages is in `reference_attention`, what is done to logits in `reference_logits`.

One layer's pages are `kv [num_pages, 2, num_kv_heads, page_size, head_dim]`, of any strides; token `p` of a sequence is
in slot `p % page_size` of page `pages[p // page_size]`, and slot number `page * page_size + p % page_size` names it.
Page 0 is reserved: never written, always zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.attention_check import FP8
from sapwood_kernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_heads,
    check_indices,
    check_kv,
    check_shape,
)
from sapwood_kernels.values import UNIT_SCALES, HeadNorms, KVScales


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`x / sqrt(mean(x ** 2) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019).

    x [num_tokens, hidden], weight fp32 [hidden] -> [num_tokens, hidden] of `dtype`.
    """
    check_shape("x", x, (None, None))
    check_shape("weight", weight, (x.shape[1],))
    check_dtype("weight", weight, (torch.float32,))
    return (_normalised(x.float(), eps) * weight).to(dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to `residual` in place, and returns the RMS norm of the sum; it may have taken x's memory for that.

    x [num_tokens, hidden], residual fp32 [num_tokens, hidden], weight fp32 [hidden] -> like x.
    """
    check_shape("residual", residual, x.shape)
    check_dtype("residual", residual, (torch.float32,))
    residual += x
    return rms_norm(residual, weight, eps, x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (SwiGLU; Shazeer, 2020). gate_up [num_tokens, 2 * size], gates first -> [num_tokens, size]."""
    check_shape("gate_up", gate_up, (None, None))
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns; accepted: an even number, gates then ups")
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rope_kv_store(
    qkv: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv: Tensor,
    head_norms: HeadNorms | None,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """Norms heads (if asked to), rotates queries and keys, stores keys and values; returns the queries.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], query, key, value heads in this order.
    cos_sin fp32 [num_tokens, head_dim]: cosines then sines of each token's angles (Su et al., 2021; half-split: element
    i turns with element i + head_dim / 2). slots int64 [num_tokens], distinct, none in page 0; a token of slot -1 is
    not stored. What is stored was divided by its scale; kv of e4m3 saturates. -> q [num_tokens, num_heads, head_dim],
    like qkv.
    """
    check_kv(kv)
    num_pages, _, num_kv_heads, page_size, head_dim = kv.shape
    num_heads = count_heads(qkv, num_kv_heads, head_dim)
    check_shape("cos_sin", cos_sin, (qkv.shape[0], head_dim))
    check_dtype("cos_sin", cos_sin, (torch.float32,))
    check_shape("slots", slots, (qkv.shape[0],))
    check_indices("slots", slots[slots != -1], page_size, num_pages * page_size)
    heads = qkv.float().view(qkv.shape[0], -1, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if head_norms is not None:
        q = _normalised(q, head_norms.eps) * head_norms.query
        k = _normalised(k, head_norms.eps) * head_norms.key
    for token, slot in enumerate(slots.tolist()):
        if slot == -1:
            continue
        key = _rotated(k[token], cos_sin[token]) / scales.key
        kv[slot // page_size, 0, :, slot % page_size] = _stored(key, kv.dtype)
        kv[slot // page_size, 1, :, slot % page_size] = _stored(v[token] / scales.value, kv.dtype)
    return _rotated(q, cos_sin.unsqueeze(1)).to(qkv.dtype)


def norm_heads(heads: Tensor, num_heads: int, head_norms: HeadNorms) -> None:
    """RMS norm of query and key heads, in place. heads fp32 [num_tokens, num_heads + num_kv_heads, head_dim]."""
    heads[:, :num_heads] = _normalised(heads[:, :num_heads], head_norms.eps) * head_norms.query
    heads[:, num_heads:] = _normalised(heads[:, num_heads:], head_norms.eps) * head_norms.key


def rotate(x: Tensor, rotations: Tensor, out: Tensor) -> None:
    """Rotates heads by matrices: `out[t, h] = x[t, h] @ rotations[t]`. A step's matrices serve every layer.

    x fp32 [num_tokens, num_heads, head_dim], rotations fp32 [num_tokens, head_dim, head_dim]; out like x.
    """
    check_shape("rotations", rotations, (x.shape[0], x.shape[2], x.shape[2]))
    check_shape("out", out, x.shape)
    for token in range(x.shape[0]):
        for head in range(x.shape[1]):
            out[token, head] = (x[token, head].unsqueeze(1) * rotations[token]).sum(dim=0)


def dense_decode(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One token's attention over keys and values that lie side by side: `softmax(q k^T * scale) v`.

    q [1, num_kv_heads, group, head_dim]; keys and values [1, num_kv_heads, num_keys, head_dim], of q's dtype and of any
    strides but for the last -> like q.
    """
    check_shape("q", q, (1, values.shape[1], None, values.shape[3]))
    check_shape("keys", keys, values.shape)
    check_shape("values", values, (1, None, None, None))
    weights = torch.softmax(q.float() @ keys.float().transpose(2, 3) * scale, dim=-1)
    return (weights @ values.float()).to(q.dtype)


def count_heads(qkv: Tensor, num_kv_heads: int, head_dim: int) -> int:
    """Query heads in a merged `qkv`. Raises ValueError if its columns are not whole heads."""
    check_shape("qkv", qkv, (None, None))
    check_dtype("qkv", qkv, FLOAT_DTYPES)
    heads, rest = divmod(qkv.shape[1], head_dim)
    if rest:
        raise ValueError(f"qkv has {qkv.shape[1]} columns; accepted: a multiple of head_dim, {head_dim}")
    check_heads(heads - 2 * num_kv_heads, num_kv_heads)
    return heads - 2 * num_kv_heads


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """torch makes NaN of what e4m3 can't hold."""
    largest = torch.finfo(dtype).max
    return (x.clamp(-largest, largest) if dtype == FP8 else x).to(dtype)
