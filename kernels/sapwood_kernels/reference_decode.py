"""Decode attention over splits, and their merge, as plain formulas in fp64: the oracle of the kernels. Never tuned.

Of `work` they read the size of a split and where a partial belongs, not the items: so a wrong plan shows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sapwood_kernels.attention_check import check_attention
from sapwood_kernels.decode_work import DecodeWork, check_work
from sapwood_kernels.partials import Partials, check_partials
from sapwood_kernels.reference_attention import capped_scores, gather_keys, visible_keys
from sapwood_kernels.values import AttentionRule, KVScales, PagedBatch


def paged_decode(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    work: DecodeWork,
    rule: AttentionRule,
    scales: KVScales,
    partials: Partials,
) -> Partials:
    """The partials of every row over each of its splits that the rule's window leaves; see `Partials`.

    q [num_rows, num_heads, head_dim], row i the last token of sequence i; kv [num_pages, 2, num_kv_heads, page_size,
    head_dim], like q or e4m3. Sinks are left to `merge_splits`. Returns `partials`; those that the window hides are not
    written.
    """
    check_attention(q, kv, batch, rule, work.layout.arch)
    check_work(work, q, kv, batch, rule)
    check_partials(partials, work.layout.capacity, q.shape[1], q.shape[2], q.device)
    for row, num_keys in enumerate(batch.num_keys.tolist()):
        for split, positions in visible_splits(num_keys, work, rule):
            keys, values = gather_keys(kv, batch.block_table[row], positions, scales)
            scores = capped_scores(q[row], keys, rule) / math.log(2)
            maximum = scores.amax(dim=-1, keepdim=True)
            weights = torch.exp2(scores - maximum)
            number = int(work.first_partial[row]) + split
            partials.maximum[number] = maximum.flatten()
            partials.total[number] = weights.sum(dim=-1).flatten()
            partials.acc[number] = (weights @ values).flatten(0, 1)
    return partials


def merge_splits(
    partials: Partials, num_keys: Tensor, work: DecodeWork, rule: AttentionRule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention of each row and the logarithm of its sum of exponentials.

    num_keys int32 [num_rows] -> out [num_rows, num_heads, head_dim] of `dtype`, and fp32 [num_rows, num_heads]:
    `log(sum(exp(scores)))`, a natural logarithm, over the keys a row sees and the sink of its head. A row without keys
    gives zeros and minus infinity.
    """
    out = torch.zeros(len(num_keys), *partials.acc.shape[1:], dtype=dtype, device=num_keys.device)
    lse = torch.full(out.shape[:2], float("-inf"), dtype=torch.float32, device=num_keys.device)
    for row, keys in enumerate(num_keys.tolist()):
        numbers = [int(work.first_partial[row]) + split for split, _ in visible_splits(keys, work, rule)]
        if not numbers:
            continue
        maximum, total, acc = (part[numbers].double() for part in (partials.maximum, partials.total, partials.acc))
        if rule.sinks is not None:
            maximum = torch.cat((maximum, rule.sinks.double()[None] / math.log(2)))
            total = torch.cat((total, torch.ones_like(total[:1])))
            acc = torch.cat((acc, torch.zeros_like(acc[:1])))
        factors = torch.exp2(maximum - maximum.amax(dim=0))
        denominator = (factors * total).sum(dim=0)
        out[row] = ((factors[..., None] * acc).sum(dim=0) / denominator[:, None]).to(dtype)
        lse[row] = (maximum.amax(dim=0) + torch.log2(denominator)) * math.log(2)
    return out, lse


def visible_splits(num_keys: int, work: DecodeWork, rule: AttentionRule) -> list[tuple[int, range]]:
    """Each split of which the last of `num_keys` tokens sees keys, with their positions."""
    size = work.layout.config.split_size
    visible = visible_keys(num_keys - 1, rule)
    splits = range(visible.start // size, -(-num_keys // size))
    return [(s, range(max(visible.start, s * size), min(visible.stop, (s + 1) * size))) for s in splits]
