"""The next token of each row of logits, drawn on the device: one copy to the host ends a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.dispatch_triton import TritonOps
from sapwood_kernels.logit_edits import LogitEdits, RowEdits, build_logit_edits
from sapwood_kernels.sample import SamplingTensors
from sapwood_server.model.choice_tokens import ChoiceTokens
from sapwood_server.model.device_memory import LOGPROB_ROWS
from sapwood_server.model.penalties import is_edited, is_penalised
from sapwood_server.model.staging import fetch, stage_new
from sapwood_server.values.plan import Draw, DrawFailure, FailedDraw, Sampled, SampleSpec, TokenLogprob

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
"""One below it is greedy. (So is one just above it: every other token's probability is 0.)"""
_NOT_FORCED = -1
_ROW_MULTIPLE = 16
"""Room of each setting, in rows: settings that are copied together then start at addresses that kernels want."""


@dataclass(frozen=True)
class _OwnLogprobs:
    """Log-probabilities of the model's own distribution, of the rows that ask for them."""

    rows: list[int]
    values: Tensor
    """fp32 [len(rows), num_tokens]."""


class DeviceSampler:
    """Draws tokens by kernels. Settings act in the order that `SamplingParams` gives.

    A row's token depends on its logits, its settings and `(seed, choice, position)` alone, bit for bit. (The CPU's
    sampler makes other draws of the same key.) Ids from `num_tokens` on are padding of the vocabulary, never drawn.
    """

    def __init__(self, vocab_size: int, num_tokens: int, device: torch.device, ops: TritonOps) -> None:
        if not 1 <= num_tokens <= vocab_size:
            raise ValueError(f"num_tokens is {num_tokens}; expected 1 to vocab_size, {vocab_size}")
        self._vocab_size = vocab_size
        self._num_tokens = num_tokens
        self._device = device
        self._ops = ops
        self._choices: dict[int, ChoiceTokens] = {}

    @torch.inference_mode()
    def sample(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[Draw]:
        """One token per row of `logits`, fp32 [len(specs), vocab_size], which are changed.

        A FailedDraw for a row that has a NaN or is infinite at its largest, as the model gave it or as its settings
        made it. ValueError for another shape or dtype.
        """
        if tuple(logits.shape) != (len(specs), self._vocab_size) or logits.dtype != torch.float32:
            expected = f"fp32 {[len(specs), self._vocab_size]}"
            raise ValueError(f"logits are {logits.dtype} {list(logits.shape)}; expected {expected}")
        if not specs:
            return []
        is_finite = logits[:, : self._num_tokens].amax(-1).isfinite()
        own = self._own_logprobs(logits, specs)
        self._ops.logits_prepare(logits, self._num_tokens, self._edits(specs))
        drawn = self._ops.sample(logits, self._settings(specs))
        waiting: tuple[Tensor, ...] = (drawn, is_finite)
        if own is not None:
            waiting += self._chosen_and_top(own, drawn, specs)
        fetched = fetch(waiting)
        draws: list[Draw] = [
            _draw(spec, token_id, is_ok)
            for spec, token_id, is_ok in zip(specs, fetched[0].tolist(), fetched[1].tolist(), strict=True)
        ]
        if own is not None:
            _tell_logprobs(draws, own.rows, specs, fetched[2:])
        return draws

    def drop(self, choice_keys: Iterable[int]) -> None:
        """Forgets what is kept for choices that ended."""
        for key in choice_keys:
            self._choices.pop(key, None)

    @property
    def num_kept(self) -> int:
        """Choices whose tokens are kept now."""
        return len(self._choices)

    def _edits(self, specs: Sequence[SampleSpec]) -> LogitEdits | None:
        """What logits are changed by before the draw; a forced row keeps its own."""
        edited = [spec.forced is None and is_edited(spec) for spec in specs]
        if not any(edited):
            return None
        rows = [self._row_edits(spec) if row else RowEdits() for spec, row in zip(specs, edited, strict=True)]
        lists = build_logit_edits(rows, self._num_tokens)
        return LogitEdits(
            first=stage_new(lists.first, self._device),
            ids=stage_new(lists.ids, self._device),
            counts=stage_new(lists.counts, self._device),
            bias=stage_new(lists.bias, self._device),
            penalties=stage_new(lists.penalties, self._device),
            longest=lists.longest,
        )

    def _row_edits(self, spec: SampleSpec) -> RowEdits:
        sampling = spec.sampling
        if not is_penalised(sampling):
            return RowEdits(bias=sampling.logit_bias, banned_ids=spec.banned_ids)
        tokens = self._choices.setdefault(spec.choice_key, ChoiceTokens(self._num_tokens))
        tokens.update(spec.prompt_ids, spec.output_ids)
        return RowEdits(
            bias=sampling.logit_bias,
            banned_ids=spec.banned_ids,
            token_ids=tokens.ids,
            token_counts=tokens.counts,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
        )

    def _settings(self, specs: Sequence[SampleSpec]) -> SamplingTensors:
        params = [spec.sampling for spec in specs]
        temperature, top_p, min_p = self._columns(
            np.float32,
            [one.temperature if one.temperature >= _SMALLEST_TEMPERATURE else 0.0 for one in params],
            [one.top_p for one in params],
            [one.min_p for one in params],
        )
        top_k, choice, position = self._columns(
            np.int32,
            [min(one.top_k, self._num_tokens) for one in params],
            [spec.choice for spec in specs],
            [len(spec.output_ids) for spec in specs],
        )
        seed = stage_new(np.array([one.seed for one in params], dtype=np.uint64).view(np.int64), self._device)
        return SamplingTensors(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            choice=choice,
            position=position,
        )

    def _columns(self, dtype: type[np.generic], *columns: Sequence[float]) -> tuple[Tensor, ...]:
        """Settings of all rows on the device, copied together."""
        num_rows = len(columns[0])
        values = np.zeros((len(columns), -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE), dtype=dtype)
        values[:, :num_rows] = columns
        return tuple(column[:num_rows] for column in stage_new(values, self._device).unbind())

    def _own_logprobs(self, logits: Tensor, specs: Sequence[SampleSpec]) -> _OwnLogprobs | None:
        """Before logits are changed. Padding of the vocabulary has no part in it."""
        rows = [row for row, spec in enumerate(specs) if spec.sampling.top_logprobs is not None]
        if not rows:
            return None
        values = torch.empty(len(rows), self._num_tokens, device=self._device)
        for block, part in zip(_blocks(self._index(rows)), _blocks(values), strict=True):
            part.copy_(logits[:, : self._num_tokens].index_select(0, block).log_softmax(-1))
        return _OwnLogprobs(rows, values)

    def _chosen_and_top(
        self, own: _OwnLogprobs, drawn: Tensor, specs: Sequence[SampleSpec]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the chosen token, fp32 [n]; of the most likely ones, best first, the smaller id first among equals: fp32
        and int64 [n, most that a row asks for]. An id of the padding, which can only be forced, has minus infinity."""
        asking = [specs[row] for row in own.rows]
        forced = self._index([_NOT_FORCED if spec.forced is None else spec.forced for spec in asking])
        chosen = torch.where(forced == _NOT_FORCED, drawn.index_select(0, self._index(own.rows)), forced)
        last = self._num_tokens - 1  # (a failed draw, which is negative, has no log-probability to look up)
        logprobs = own.values.gather(1, chosen.clamp(0, last)[:, None])[:, 0]
        logprobs = torch.where(chosen > last, -torch.inf, logprobs)
        most = min(max(spec.sampling.top_logprobs or 0 for spec in asking), self._num_tokens)
        if most == 0:
            none = own.values.new_empty(len(own.rows), 0)
            return logprobs, none, none
        values, ids = zip(*(self._ranked(block, most) for block in _blocks(own.values)), strict=True)
        return logprobs, torch.cat(values), torch.cat(ids)

    @staticmethod
    def _ranked(logprobs: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The `most` likely of each row, the smaller id first among equals: topk would take any of them."""
        values, ids = torch.sort(logprobs, dim=-1, descending=True, stable=True)
        return values[:, :most].clone(), ids[:, :most].clone()

    def _index(self, rows: Sequence[int]) -> Tensor:
        return stage_new(np.array(rows, dtype=np.int64), self._device)


def _blocks(rows: Tensor) -> tuple[Tensor, ...]:
    """Views of LOGPROB_ROWS rows each."""
    return torch.split(rows, LOGPROB_ROWS)


def _draw(spec: SampleSpec, drawn: int, is_finite: bool) -> Draw:
    """What came of a row: `drawn` is negative for one that left no token."""
    if not is_finite:
        return FailedDraw(DrawFailure.NOT_FINITE)
    if spec.forced is not None:
        return Sampled(spec.forced)
    return Sampled(drawn) if drawn >= 0 else FailedDraw(DrawFailure.NOTHING_LEFT)


def _tell_logprobs(
    draws: list[Draw], rows: Sequence[int], specs: Sequence[SampleSpec], fetched: Sequence[Tensor]
) -> None:
    """Gives the draws of `rows` their log-probabilities; see `DeviceSampler._chosen_and_top`."""
    chosen, values, ids = (tensor.tolist() for tensor in fetched)
    for index, row in enumerate(rows):
        draw = draws[row]
        if isinstance(draw, Sampled):
            num_top = specs[row].sampling.top_logprobs or 0
            top = tuple(zip(ids[index][:num_top], values[index][:num_top], strict=True))
            draws[row] = Sampled(draw.token_id, TokenLogprob(draw.token_id, chosen[index], top))
