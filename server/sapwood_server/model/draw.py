"""From probabilities to token ids: top-k, top-p and min-p as one prefix of the ranking, then inversion of the CDF.

Every value of a row is computed from that row alone, in an order that the batch size does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 256
"""Tokens whose mass is summed first, so that the exact cumulative sum is short."""
_RANKED = (256, 4096)
"""How many of the most likely tokens to rank before ranking them all: a nucleus is rarely larger, and a whole sort of
49,152 probabilities takes 5 ms a row on a CPU where the 256 largest take 0.3."""


@dataclass(frozen=True)
class Filters:
    """Of each row of a batch; tensors [R]."""

    top_k: Tensor
    """int64; 0 is off."""
    top_p: Tensor
    """fp64; 1 is off."""
    min_p: Tensor
    """fp64; 0 is off."""

    def rows(self, index: Tensor) -> Filters:
        return Filters(self.top_k[index], self.top_p[index], self.min_p[index])


@dataclass(frozen=True)
class _Ranking:
    """The most likely tokens of each row, best first, the smaller id first among equals; [R, K]."""

    probabilities: Tensor
    ids: Tensor
    num_exact: Tensor
    """int64 [R]: this many ranks are those of the whole row. (Behind them, equals of the last may be left out.)"""


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Index by inverse CDF: the first whose cumulative mass exceeds `uniform` times the row's mass.

    `probabilities` [R, V] fp32, not necessarily summing to 1, with some mass in each row; `uniform` [R] fp64 in [0, 1).
    Returns int64 [R]. An entry of zero is never drawn. Sums are fp64, and taken in two levels.
    """
    num_rows, size = probabilities.shape
    if size % _BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, -size % _BLOCK))
    blocks = probabilities.reshape(num_rows, -1, _BLOCK)
    block_cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform * block_cdf[:, -1]
    block = (block_cdf <= target[:, None]).sum(-1)
    before = block_cdf.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0].where(block > 0, 0.0)
    cdf = blocks[torch.arange(num_rows, device=block.device), block].double().cumsum(-1)
    offset = (cdf <= (target - before)[:, None]).sum(-1)
    # The two levels may differ in the last bit; never step behind the block's last token that has mass.
    last = (cdf < cdf[:, -1:]).sum(-1)
    return block * _BLOCK + torch.minimum(offset, last)


def draw_filtered(probabilities: Tensor, filters: Filters, uniform: Tensor) -> Tensor:
    """As `draw`, over the tokens that pass the filters, ranked by probability, the smaller id first among equals.

    Top-k keeps the k first; top-p of those, renormalised, the shortest prefix whose mass reaches p; min-p what has at
    least `min_p` times the largest probability. At least one token is kept. Returns token ids, int64 [R].
    """
    drawn = torch.empty(probabilities.shape[0], dtype=torch.int64, device=probabilities.device)
    todo = torch.arange(probabilities.shape[0], device=probabilities.device)
    for ranked in (*_RANKED, probabilities.shape[1]):
        ranking = _rank(probabilities[todo], ranked)
        kept, known = _num_kept(ranking, filters.rows(todo))
        done = todo[known]
        width = int(kept[known].max()) if len(done) else 0
        inside = torch.arange(width, device=kept.device) < kept[known][:, None]
        ranks = draw(ranking.probabilities[known, :width].where(inside, 0.0), uniform[done]) if width else done
        drawn[done] = ranking.ids[known].gather(1, ranks[:, None])[:, 0]
        todo = todo[~known]
        if not len(todo):
            break
    return drawn


def _rank(probabilities: Tensor, ranked: int) -> _Ranking:
    """The `ranked` most likely tokens of each row of [R, V], or all V."""
    num_tokens = probabilities.shape[1]
    if ranked >= num_tokens:
        values, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        return _Ranking(values, ids, torch.full((len(ids),), num_tokens, device=ids.device))
    values, ids = torch.topk(probabilities, ranked, dim=-1, sorted=False)
    ids, order = torch.sort(ids, dim=-1)
    values, order = torch.sort(values.gather(1, order), dim=-1, descending=True, stable=True)
    # Of tokens as likely as the last one, top-k took any: only those strictly before it are sure.
    return _Ranking(values, ids.gather(1, order), (values > values[:, -1:]).sum(-1))


def _num_kept(ranking: _Ranking, filters: Filters) -> tuple[Tensor, Tensor]:
    """How many ranks of each row pass (int64 [R], at least 1), and whether the ranking reaches far enough to say so."""
    exact, values = ranking.num_exact[:, None], ranking.probabilities
    ranks = torch.arange(values.shape[1], device=values.device)
    in_top_k = ranks < torch.where(filters.top_k > 0, filters.top_k, ranking.ids.shape[1])[:, None]
    mass = values.where(in_top_k, 0.0).double().cumsum(-1)
    # The softmax's own sum is 1, so only a top-k needs its mass summed up.
    bound = filters.top_p * torch.where(filters.top_k > 0, mass[:, -1], 1.0)
    mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    in_top_p = (mass_before < bound[:, None]) | (filters.top_p >= 1.0)[:, None]
    in_min_p = values.double() >= (filters.min_p * values[:, 0])[:, None]
    passing = in_top_k & in_top_p & in_min_p
    kept = passing.sum(-1).clamp(min=1)
    whole = (ranking.num_exact == values.shape[1])[:, None]
    top_k_known = (filters.top_k > 0) & (filters.top_k <= ranking.num_exact)
    stops_inside = (filters.top_k == 0) & (~passing & (ranks < exact)).any(-1)
    return kept, whole[:, 0] | top_k_known | stops_inside
