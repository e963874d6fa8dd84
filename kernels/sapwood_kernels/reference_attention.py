"""Attention over pages as plain formulas in fp64: the oracle of the kernels. Never tuned.

`work` is the batch planned for a device; the formulas read the batch alone, so that a wrong plan shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.attention_check import check_paged
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, KVScales, PagedBatch


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    work: object,
    rule: AttentionRule,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """Causal attention of each sequence's queries over its pages: `softmax(q k^T * scale) v`, query heads in groups.

    q [num_tokens, num_heads, head_dim]; kv [num_pages, 2, num_kv_heads, page_size, head_dim], keys then values ->
    like q. The rule's window, softcap and sinks as `AttentionRule` says. A query that sees no key gives zeros.
    """
    check_paged(q, kv, batch, rule)
    out = torch.zeros_like(q)
    first_query = batch.first_query.tolist()
    for sequence, num_keys in enumerate(batch.num_keys.tolist()):
        rows = range(first_query[sequence], first_query[sequence + 1])
        for position, row in enumerate(rows, num_keys - len(rows)):
            keys, values = gather_keys(kv, batch.block_table[sequence], visible_keys(position, rule), scales)
            out[row] = attend(q[row], keys, values, rule).to(q.dtype)
    return out


def visible_keys(position: int, rule: AttentionRule) -> range:
    """The positions of the keys that a query at `position` sees; none before position 0."""
    first = 0 if rule.window is None else max(position - rule.window + 1, 0)
    return range(first, max(position + 1, first))


def gather_keys(kv: Tensor, pages: Tensor, positions: range, scales: KVScales) -> tuple[Tensor, Tensor]:
    """fp64 keys and values at some positions of the sequence in `pages`, each [num_kv_heads, num_keys, head_dim]."""
    page_size = kv.shape[3]
    at = torch.tensor(positions, dtype=torch.int64, device=kv.device)
    tokens = kv[pages[at // page_size].long(), :, :, at % page_size].double()
    keys, values = tokens.permute(1, 2, 0, 3)
    return keys * scales.key, values * scales.value


def attend(query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
    """query [num_heads, head_dim]; keys, values [num_kv_heads, num_keys, head_dim] -> fp64 [num_heads, head_dim]."""
    scores = capped_scores(query, keys, rule)
    if rule.sinks is not None:
        sinks = rule.sinks.double().view(keys.shape[0], -1, 1)
        scores = torch.cat((scores, sinks), dim=-1)
        values = torch.cat((values, values.new_zeros(keys.shape[0], 1, keys.shape[2])), dim=1)
    if scores.shape[2] == 0:
        return torch.zeros_like(query, dtype=torch.float64)
    return (torch.softmax(scores, dim=-1) @ values).flatten(0, 1)


def capped_scores(query: Tensor, keys: Tensor, rule: AttentionRule) -> Tensor:
    """query [num_heads, head_dim]; keys [num_kv_heads, num_keys, head_dim] -> fp64 [num_kv_heads, group, num_keys]."""
    scores = query.double().view(keys.shape[0], -1, keys.shape[2]) @ keys.transpose(1, 2) * rule.scale
    return scores if rule.softcap is None else rule.softcap * torch.tanh(scores / rule.softcap)
