"""The CPU's ops under `--deterministic`: a row's bits depend on that row and on what it attends to, on nothing else.

torch's own kernels don't hold to that. Products and flash attention sum in an order that follows the number of rows;
`silu` takes another exponential for the elements that a vector loop leaves over. Here attention runs on blocks of one
shape, at places that positions alone decide; all else is a sum over a row, or one IEEE operation after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood_kernels.cpu import (
    check_rule,
    check_scales,
    dense_decode,
    norm_heads,
    pages_of_heads,
    rope_kv_store,
    rotate,
)
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, KVScales, PagedBatch, PagedSequence

__all__ = [
    "add_rms_norm",
    "dense_decode",
    "norm_heads",
    "paged_prefill",
    "rms_norm",
    "rope_kv_store",
    "rotate",
    "silu_mul",
]

QUERY_BLOCK = 16
"""Queries of a block, whose first one's position is a multiple of it."""
KEY_TILE = 512
"""Keys of a tile, likewise. A multiple of every page size and of QUERY_BLOCK."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """See `reference.rms_norm`. x is fp32."""
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return (x / mean_square.add_(eps).sqrt_() * weight).to(dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.add_rms_norm`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps, x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`. (torch's `exp` takes every element through one vector code, its `silu` doesn't.)"""
    gate, up = gate_up.view(gate_up.shape[0], 2, -1).float().unbind(1)
    return (gate / gate.neg().exp_().add_(1.0)).mul_(up).to(gate_up.dtype)


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    work: Sequence[PagedSequence],
    rule: AttentionRule,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """See `reference_attention.paged_prefill`: in fp32, an online softmax over tiles of keys, in ascending order.

    A query's place in its block and a key's in its tile follow from their positions. So every product, sum and
    exponential that makes a row is the same call on the same places whatever chunk the row came in; what other rows of
    the block hold can't reach it.
    """
    check_rule(rule)
    check_scales(scales)
    if KEY_TILE % kv.shape[3]:
        raise ValueError(f"kv has pages of {kv.shape[3]} tokens; accepted: a divisor of {KEY_TILE}")
    pages = pages_of_heads(kv)
    out = torch.empty_like(q)
    for sequence in work:
        rows = slice(sequence.first_query, sequence.first_query + sequence.num_queries)
        out[rows] = _attend(q[rows], pages, sequence, rule.scale)
    return out


class _QueryBlock:
    """QUERY_BLOCK queries and the state of their online softmax (Milakov and Gimelshein, 2018)."""

    def __init__(self, position: int, queries: Tensor) -> None:
        self.position = position
        """Of the first query."""
        self._queries = queries
        """[num_kv_heads, group * QUERY_BLOCK, head_dim], scaled; the queries of a head lie side by side."""
        self._maximum = queries.new_full((*queries.shape[:2], 1), float("-inf"))
        self._total = torch.zeros_like(self._maximum)
        self._acc = torch.zeros_like(queries)

    def fold(self, tile: int, keys: Tensor, values: Tensor) -> None:
        """Takes in a tile, keys and values [num_kv_heads, KEY_TILE, head_dim]."""
        scores = torch.bmm(self._queries, keys.transpose(1, 2))
        if self.position // KEY_TILE == tile:
            by_query = scores.view(scores.shape[0], -1, QUERY_BLOCK, KEY_TILE)
            by_query.masked_fill_(_hidden_keys(self.position % KEY_TILE), float("-inf"))
        maximum = torch.maximum(self._maximum, scores.amax(dim=-1, keepdim=True))
        weights = scores.sub_(maximum).exp_()
        alpha = self._maximum.sub_(maximum).exp_()
        self._maximum = maximum
        self._total.mul_(alpha).add_(weights.sum(dim=-1, keepdim=True))
        self._acc.mul_(alpha).add_(torch.bmm(weights, values))

    def result(self) -> Tensor:
        """[num_kv_heads, group * QUERY_BLOCK, head_dim]."""
        return self._acc / self._total


def _attend(q: Tensor, pages: Tensor, sequence: PagedSequence, scale: float) -> Tensor:
    """One sequence's queries, [num_queries, num_heads, head_dim], over its pages: the same shape, in fp32."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = pages.shape[0] // 2
    start = sequence.num_keys - num_queries
    before = start % QUERY_BLOCK
    num_blocks = -(-(before + num_queries) // QUERY_BLOCK)
    rows = torch.zeros(num_blocks * QUERY_BLOCK, num_heads, head_dim)
    rows[before : before + num_queries] = q
    rows.mul_(scale)
    grouped = rows.view(num_blocks, QUERY_BLOCK, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    blocks = [
        _QueryBlock(start - before + index * QUERY_BLOCK, queries)
        for index, queries in enumerate(grouped.reshape(num_blocks, num_kv_heads, -1, head_dim))
    ]
    for tile in range(-(-sequence.num_keys // KEY_TILE)):
        keys, values = _gather_tile(pages, sequence, tile)
        for block in blocks:
            if block.position >= tile * KEY_TILE:
                block.fold(tile, keys, values)
    results = torch.stack([block.result() for block in blocks])
    by_query = results.view(num_blocks, num_heads, QUERY_BLOCK, head_dim).transpose(1, 2)
    return by_query.flatten(0, 1)[before : before + num_queries]


def _gather_tile(pages: Tensor, sequence: PagedSequence, tile: int) -> tuple[Tensor, ...]:
    """fp32 keys and values of one tile, each [num_kv_heads, KEY_TILE, head_dim]; zeros behind the sequence's last."""
    num_heads, _, page_size, head_dim = pages.shape
    per_tile = KEY_TILE // page_size
    used = sequence.pages[tile * per_tile : (tile + 1) * per_tile]
    count = min(KEY_TILE, sequence.num_keys - tile * KEY_TILE)
    tokens = torch.zeros(num_heads, KEY_TILE, head_dim)
    tokens[:, :count] = pages.index_select(1, used).flatten(1, 2)[:, :count]
    return tokens.chunk(2)


@functools.cache
def _hidden_keys(offset: int) -> Tensor:
    """Which keys of its own tile a block `offset` keys into it doesn't see, bool [QUERY_BLOCK, KEY_TILE]."""
    return torch.ones(QUERY_BLOCK, KEY_TILE, dtype=torch.bool).triu(offset + 1)
