"""The runner: carries out a step plan, whatever the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from sapwood_server.model.placement import PlacedRow
from sapwood_server.model.staging import stage_new
from sapwood_server.values.messages import EngineInfo
from sapwood_server.values.plan import Draw, SampleSpec, StepPlan, StepResult


class ForwardPass(Protocol):
    """Model, KV pages and block tables on one device."""

    def place(self, plan: StepPlan) -> list[PlacedRow]:
        """Everything that comes before the forward pass: releases, page copies, block tables. The rows in the order of
        computing. ValueError for a plan that breaks its own rules."""

    def logits(self, placed: Sequence[PlacedRow], tokens: Sequence[int]) -> Tensor:
        """Every token of the placed rows through the decoder, its KV written. `tokens` are some of the step's,
        ascending: their logits are returned, fp32 [len(tokens), vocab_size], the caller's own."""

    def kv_pages(self, page: int) -> Tensor:
        """What a page holds now, [num_layers, 2, num_kv_heads, page_size, head_dim]: to be read only."""

    def capture_graphs(self) -> None:
        """Once, after a first step of each phase and while no sequence holds pages: CUDA graphs, if there are any."""


class TokenSampler(Protocol):
    """Draws from logits; see `sampler.Sampler`."""

    def sample(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[Draw]: ...
    def drop(self, choice_keys: Iterable[int]) -> None: ...


class ModelRunner:
    """Forward pass and sampler of one engine."""

    def __init__(self, forward: ForwardPass, sampler: TokenSampler, info: EngineInfo) -> None:
        self.info = info
        self._forward = forward
        self._sampler = sampler

    def execute(self, plan: StepPlan) -> StepResult:
        """Drops what ended, copies pages, computes the rows, samples.

        ValueError for a plan that breaks its own rules (a page that does not exist, a table too short); KV pages may
        then hold part of the step. On a GPU `forward_seconds` is the time to order the work, and waiting for it counts
        as sampling.
        """
        with torch.inference_mode():
            started = time.perf_counter()
            self._sampler.drop(plan.ended_choices)
            placed = self._forward.place(plan)
            logits = self._forward.logits(placed, _sampled_tokens(placed)) if placed else None
            computed = time.perf_counter()
            sampled = self._draw(placed, logits) if logits is not None else []
            return StepResult(
                samples=_by_plan(placed, sampled),
                forward_seconds=computed - started,
                sample_seconds=time.perf_counter() - computed,
            )

    def _draw(self, placed: Sequence[PlacedRow], logits: Tensor) -> list[Draw]:
        """Draws in the order of computing, from one row of logits for each row that is sampled from.

        Of at most `max_num_seqs` samples at a time: memory is planned for as many, and a request's `n` may be more.
        """
        sampled_rows = [item.row.samples for item in placed if item.row.samples]
        specs = list(itertools.chain.from_iterable(sampled_rows))
        counts = [len(samples) for samples in sampled_rows]
        if len(specs) == len(counts):
            return self._sampler.sample(logits, specs) if specs else []
        rows = np.repeat(np.arange(len(counts)), counts)
        draws: list[Draw] = []
        for start in range(0, len(specs), self.info.max_num_seqs):
            chosen = slice(start, start + self.info.max_num_seqs)
            repeated = logits.index_select(0, stage_new(rows[chosen], logits.device))
            draws += self._sampler.sample(repeated, specs[chosen])
        return draws

    def token_logits(self, plan: StepPlan) -> tuple[Tensor, ...]:
        """Executes the plan without sampling; the logits of every token, fp32 [num_tokens, vocab_size] per row.

        For measurements of the model itself, such as perplexity.
        """
        with torch.inference_mode():
            placed = self._forward.place(plan)
            counts = [len(item.row.token_ids) for item in placed]
            logits = self._forward.logits(placed, range(sum(counts)))
            rows = sorted(zip(placed, torch.split(logits, counts), strict=True), key=lambda pair: pair[0].index)
            return tuple(part for _, part in rows)

    def kv_pages(self, page: int) -> Tensor:
        """What a page holds now, [num_layers, 2, num_kv_heads, page_size, head_dim]: to be read only."""
        return self._forward.kv_pages(page)

    def capture_graphs(self) -> None:
        """Once, after a first step of each phase and while no sequence holds pages: CUDA graphs, if there are any."""
        with torch.inference_mode():
            self._forward.capture_graphs()

    def finish_loading(self, seconds: float) -> None:
        """Notes how long it took until the first step can run."""
        self.info = msgspec.structs.replace(self.info, load_seconds=seconds)


def _sampled_tokens(placed: Sequence[PlacedRow]) -> list[int]:
    """The last token of each row that is sampled from: the head runs once for each, however many samples that are."""
    tokens = []
    token = -1
    for item in placed:
        token += len(item.row.token_ids)
        if item.row.samples:
            tokens.append(token)
    return tokens


def _by_plan(placed: Sequence[PlacedRow], sampled: Sequence[Draw]) -> tuple[tuple[Draw, ...], ...]:
    """Samples, which are in the order of computing, in that of the plan."""
    samples: list[tuple[Draw, ...]] = [()] * len(placed)
    first = 0
    for item in placed:
        count = len(item.row.samples)
        samples[item.index] = tuple(sampled[first : first + count])
        first += count
    return tuple(samples)
