"""Changes to a row of logits before it becomes a distribution: bias, penalties, banned ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sapwood_server.values.plan import SampleSpec
from sapwood_server.values.sampling import SamplingParams


def is_edited(spec: SampleSpec) -> bool:
    """Whether the logits of this draw are changed at all."""
    return bool(spec.sampling.logit_bias or spec.banned_ids) or is_penalised(spec.sampling)


def is_penalised(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class TokenCounts:
    """How often each token occurs in one choice, kept up to date by what was added since the last draw."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        self._in_output = torch.zeros(num_tokens, dtype=torch.float32, device=device)
        self._in_prompt: Tensor | None = None
        self._num_seen = 0

    def update(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Both are the whole sequences; of the output only what is new is read."""
        if self._in_prompt is None:
            self._in_prompt = self._count(prompt_ids) > 0
        if len(output_ids) < self._num_seen:
            self._in_output.zero_()
            self._num_seen = 0
        if len(output_ids) > self._num_seen:
            self._in_output += self._count(output_ids[self._num_seen :])
            self._num_seen = len(output_ids)

    def penalise(self, row: Tensor, sampling: SamplingParams) -> Tensor:
        """`row` [num_tokens] with repetition, then presence and frequency penalties; see `SamplingParams`."""
        if sampling.repetition_penalty != 1.0:
            seen = self._in_output > 0 if self._in_prompt is None else self._in_prompt | (self._in_output > 0)
            penalised = torch.where(row > 0, row / sampling.repetition_penalty, row * sampling.repetition_penalty)
            row = torch.where(seen, penalised, row)
        if sampling.presence_penalty != 0.0:
            row = row - sampling.presence_penalty * (self._in_output > 0)
        if sampling.frequency_penalty != 0.0:
            row = row - sampling.frequency_penalty * self._in_output
        return row

    def _count(self, ids: Sequence[int]) -> Tensor:
        """fp32 [num_tokens]. Padding ids, which a prompt may hold, are never drawn and need no penalty."""
        index = torch.tensor(ids, dtype=torch.int64, device=self._in_output.device)
        return torch.bincount(index, minlength=self._num_tokens)[: self._num_tokens].to(torch.float32)


class LogitEditor:
    """Applies each draw's changes. Keeps counts per choice, for choices that have penalties."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        self._device = device
        self._counts: dict[int, TokenCounts] = {}

    def edit(self, row: Tensor, spec: SampleSpec) -> Tensor:
        """A new [num_tokens] row: bias, penalties, then minus infinity for banned ids."""
        edited = row.clone()
        if spec.sampling.logit_bias:
            # Padding ids are never drawn, so a bias on one has no effect.
            bias = [(id_, value) for id_, value in spec.sampling.logit_bias if id_ < self._num_tokens]
            index = torch.tensor([id_ for id_, _ in bias], dtype=torch.int64, device=self._device)
            edited.index_add_(0, index, torch.tensor([value for _, value in bias], device=self._device))
        if is_penalised(spec.sampling):
            edited = self._counts_of(spec).penalise(edited, spec.sampling)
        if spec.banned_ids:
            banned = [id_ for id_ in spec.banned_ids if id_ < self._num_tokens]
            edited[torch.tensor(banned, dtype=torch.int64, device=self._device)] = -torch.inf
        return edited

    def drop(self, choice_keys: Iterable[int]) -> None:
        """Forgets choices that ended."""
        for key in choice_keys:
            self._counts.pop(key, None)

    @property
    def num_kept(self) -> int:
        """Choices with counts now."""
        return len(self._counts)

    def _counts_of(self, spec: SampleSpec) -> TokenCounts:
        counts = self._counts.get(spec.choice_key)
        if counts is None:
            counts = self._counts[spec.choice_key] = TokenCounts(self._num_tokens, self._device)
        counts.update(spec.prompt_ids, spec.output_ids)
        return counts
