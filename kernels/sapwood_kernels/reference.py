"""Every op as a plain formula in fp32: the oracle. Never tuned. The fast forms of an op have the same signature.

One layer's pages are `kv [num_pages, 2, num_kv_heads, page_size, head_dim]`, of any strides; token `p` of a sequence is
in slot `p % page_size` of page `pages[p // page_size]`, and slot number `page * page_size + p % page_size` names it.
Page 0 is reserved: never written, always zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood_kernels.check import (
    FLOAT_DTYPES,
    check_dtype,
    check_heads,
    check_indices,
    check_kv,
    check_shape,
)
from sapwood_kernels.values import HeadNorms, PagedSequence


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


def rope_kv_store(qkv: Tensor, cos_sin: Tensor, slots: Tensor, kv: Tensor, head_norms: HeadNorms | None) -> Tensor:
    """Norms heads (if asked to), rotates queries and keys, stores keys and values; returns the queries.

    qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], query, key, value heads in this order.
    cos_sin fp32 [num_tokens, head_dim]: cosines then sines of each token's angles (Su et al., 2021; half-split: element
    i turns with element i + head_dim / 2). slots int64 [num_tokens], distinct, none in page 0.
    -> q [num_tokens, num_heads, head_dim], like qkv.
    """
    check_kv(kv)
    num_pages, _, num_kv_heads, page_size, head_dim = kv.shape
    num_heads = count_heads(qkv, num_kv_heads, head_dim)
    check_shape("cos_sin", cos_sin, (qkv.shape[0], head_dim))
    check_dtype("cos_sin", cos_sin, (torch.float32,))
    check_shape("slots", slots, (qkv.shape[0],))
    check_indices("slots", slots, page_size, num_pages * page_size)
    heads = qkv.float().view(qkv.shape[0], -1, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if head_norms is not None:
        q = _normalised(q, head_norms.eps) * head_norms.query
        k = _normalised(k, head_norms.eps) * head_norms.key
    for token, slot in enumerate(slots.tolist()):
        kv[slot // page_size, 0, :, slot % page_size] = _rotated(k[token], cos_sin[token]).to(kv.dtype)
        kv[slot // page_size, 1, :, slot % page_size] = v[token].to(kv.dtype)
    return _rotated(q, cos_sin.unsqueeze(1)).to(qkv.dtype)


def paged_prefill(q: Tensor, kv: Tensor, sequences: Sequence[PagedSequence], scale: float) -> Tensor:
    """Causal attention of each sequence's queries over its pages: `softmax(q k^T * scale) v`, query heads in groups.

    q [num_tokens, num_heads, head_dim], every row in exactly one sequence -> like q.
    """
    check_attention(q, kv, sequences)
    out = torch.full_like(q, float("nan"))
    for sequence in sequences:
        rows = slice(sequence.first_query, sequence.first_query + sequence.num_queries)
        keys, values = _gathered(kv, sequence)
        for row, query in enumerate(q[rows].float()):
            visible = sequence.num_keys - sequence.num_queries + 1 + row
            out[rows][row] = _attend(query, keys[:, :visible], values[:, :visible], scale).to(q.dtype)
    return out


def paged_decode(q: Tensor, kv: Tensor, sequences: Sequence[PagedSequence], scale: float) -> Tensor:
    """The same with one query per sequence: the last token of each.

    q [num_sequences, num_heads, head_dim] -> like q.
    """
    if any(sequence.num_queries != 1 for sequence in sequences):
        raise ValueError(f"num_queries is {[s.num_queries for s in sequences]}; accepted: 1 each")
    return paged_prefill(q, kv, sequences, scale)


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


def dense_decode(q: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
    """One token's attention over keys and values that lie side by side: `out = softmax(q k^T * scale) v`.

    q and out fp32 [num_kv_heads, group, head_dim]; keys fp32 [num_kv_heads, head_dim, num_keys], transposed; values
    fp32 [num_kv_heads, num_keys, head_dim]. Any strides but for head_dim of q, values and out, num_keys of keys.
    """
    check_shape("q", q, (values.shape[0], None, values.shape[2]))
    check_shape("keys", keys, (values.shape[0], values.shape[2], values.shape[1]))
    check_shape("out", out, q.shape)
    for head in range(q.shape[0]):
        out[head] = torch.softmax(q[head] @ keys[head] * scale, dim=-1) @ values[head]


def count_heads(qkv: Tensor, num_kv_heads: int, head_dim: int) -> int:
    """Query heads in a merged `qkv`. Raises ValueError if its columns are not whole heads."""
    check_shape("qkv", qkv, (None, None))
    check_dtype("qkv", qkv, FLOAT_DTYPES)
    heads, rest = divmod(qkv.shape[1], head_dim)
    if rest:
        raise ValueError(f"qkv has {qkv.shape[1]} columns; accepted: a multiple of head_dim, {head_dim}")
    check_heads(heads - 2 * num_kv_heads, num_kv_heads)
    return heads - 2 * num_kv_heads


def check_attention(q: Tensor, kv: Tensor, sequences: Sequence[PagedSequence]) -> None:
    """Shapes agree, the sequences' queries are q's rows in order, and their pages hold their keys."""
    check_kv(kv)
    num_pages, _, num_kv_heads, page_size, head_dim = kv.shape
    check_shape("q", q, (sum(sequence.num_queries for sequence in sequences), None, head_dim))
    check_heads(q.shape[1], num_kv_heads)
    row = 0
    for sequence in sequences:
        if sequence.first_query != row:
            raise ValueError(f"first_query is {sequence.first_query}; accepted: {row}, after the sequence before it")
        row += sequence.num_queries
        check_shape("pages", sequence.pages, (-(-sequence.num_keys // page_size),))
        check_indices("pages", sequence.pages, 1, num_pages)


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _gathered(kv: Tensor, sequence: PagedSequence) -> tuple[Tensor, Tensor]:
    """fp32 keys and values of the sequence, each [num_kv_heads, num_keys, head_dim]."""
    tokens = kv[sequence.pages].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : sequence.num_keys]
    return tokens[0], tokens[1]


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """query [num_heads, head_dim]; keys, values [num_kv_heads, num_keys, head_dim] -> [num_heads, head_dim]."""
    grouped = query.view(keys.shape[0], -1, keys.shape[2])
    weights = torch.softmax(grouped @ keys.transpose(1, 2) * scale, dim=-1)
    return (weights @ values).flatten(0, 1)
