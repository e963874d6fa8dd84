"""Attention of a whole case in fp64, fast enough for a GPU to check every row of every shape that is timed.

`sapwood_kernels.reference_attention` says the same row by row; a test holds the two together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_bench.kernels.inputs import AttentionInputs, PhaseTensors
from sapwood_kernels.reference_attention import gather_keys

SCORE_ELEMENTS = 2**27
"""Of one block of scores: 1 GiB in fp64."""


def exact_attention(inputs: AttentionInputs, part: PhaseTensors) -> Tensor:
    """fp64 [num_queries, num_heads, head_dim]: see `reference_attention.paged_prefill`, for either phase."""
    out = torch.zeros(part.q.shape, dtype=torch.float64, device=part.q.device)
    kv = inputs.kv if inputs.kv.dtype == part.q.dtype else inputs.kv.to(part.q.dtype)  # e4m3 fits any of them
    first = 0
    for sequence, (num_queries, num_keys) in enumerate(
        zip(part.num_queries.tolist(), part.num_keys.tolist(), strict=True)
    ):
        if num_keys:
            keys, values = gather_keys(kv, part.batch.block_table[sequence], range(num_keys), inputs.scales)
            block = max(SCORE_ELEMENTS // (part.q.shape[1] * num_keys), 1)
            for start in range(0, num_queries, block):
                rows = slice(first + start, first + min(start + block, num_queries))
                position = num_keys - num_queries + start
                out[rows] = _attend(part.q[rows].double(), keys, values, position, inputs)
        first += num_queries
    return out


def relative_error(found: Tensor, exact: Tensor) -> float:
    """`|found - exact| / |exact|` in the Euclidean norm; infinite if anything found isn't finite."""
    if not torch.isfinite(found).all():
        return float("inf")
    difference = torch.linalg.vector_norm(found.double() - exact)
    return float(difference / torch.linalg.vector_norm(exact).clamp_min(1e-30))


def _attend(q: Tensor, keys: Tensor, values: Tensor, position: int, inputs: AttentionInputs) -> Tensor:
    """Consecutive queries from `position` on: q [num_queries, num_heads, head_dim]; keys and values [num_kv_heads,
    num_keys, head_dim] -> like q."""
    rule, num_kv_heads = inputs.rule, keys.shape[0]
    num_queries, num_heads, head_dim = q.shape
    grouped = q.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = grouped.flatten(1, 2) @ keys.transpose(1, 2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.view(num_kv_heads, -1, num_queries, keys.shape[1])
    queries = torch.arange(position, position + num_queries, device=q.device)[:, None]
    positions = torch.arange(keys.shape[1], device=q.device)[None, :]
    hidden = positions > queries
    if rule.window is not None:
        hidden |= positions <= queries - rule.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.double().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
        values = torch.cat((values, torch.zeros_like(values[:, :1])), dim=1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a query before position 0 sees nothing
    out = weights.flatten(1, 2) @ values
    return (
        out.view(num_kv_heads, -1, num_queries, head_dim).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
    )
