"""Drives a runner the way the scheduler does: sequences, their pages, step plans."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sapwood_kernels.dispatch import CpuOps
from sapwood_server.config import ServerConfig
from sapwood_server.model import load
from sapwood_server.model.cpu_forward import CpuForward
from sapwood_server.model.load_plan import plan_load
from sapwood_server.model.runner import ModelRunner
from sapwood_server.model.sampler import Sampler
from sapwood_server.values.plan import PageCopy, Phase, RowPlan, SampleSpec, StepPlan
from sapwood_server.values.sampling import SamplingParams
from support.draws import ids_of

GREEDY = SamplingParams(temperature=0.0)


def make_config(
    model: Path | str,
    dtype: str = "float32",
    page_size: int = 16,
    kv_memory: str = "64MiB",
    *,
    deterministic: bool = False,
) -> ServerConfig:
    """A server's configuration with little memory."""
    return ServerConfig(
        model=str(model),
        dtype=dtype,
        page_size=page_size,
        kv_memory=kv_memory,
        max_batched_tokens=64,
        deterministic=deterministic,
    )


def make_runner(config: ServerConfig, *, dense_bytes: int | None = None, ops: CpuOps | None = None) -> ModelRunner:
    """A runner without warm-up; with other memory for dense copies, or other ops, if given."""
    plan = plan_load(config)
    if dense_bytes is not None:
        plan = dataclasses.replace(plan, kv=dataclasses.replace(plan.kv, dense_bytes=dense_bytes))
    model = load.load_model(plan, lambda stage, fraction: None)
    if ops is None:
        return load.make_runner(plan, model)
    forward = CpuForward(model, ops, plan.kv, plan.max_model_len)
    return ModelRunner(forward, Sampler(plan.config.vocab_size), load.engine_info(plan, model))


def sample_spec(sampling: SamplingParams = GREEDY, choice_key: int = 0) -> SampleSpec:
    """One draw whose settings need no history."""
    return SampleSpec(choice_key=choice_key, choice=0, sampling=sampling, prompt_ids=(), output_ids=())


class DrivenSequence:
    """One sequence: how many of its tokens are written, and in which pages."""

    def __init__(self, sequence_id: int, page_size: int, free_pages: list[int]) -> None:
        self.sequence_id = sequence_id
        self.num_written = 0
        self.pages: list[int] = []
        self._page_size = page_size
        self._free_pages = free_pages
        self._announced = 0

    def adopt(self, pages: Sequence[int], num_tokens: int) -> None:
        """Starts with pages that already hold the first `num_tokens` tokens."""
        self.pages.extend(pages)
        self.num_written = num_tokens

    def row(self, token_ids: Sequence[int], phase: Phase, samples: tuple[SampleSpec, ...] = ()) -> RowPlan:
        """The next tokens as a row; they count as written."""
        start = self.num_written
        self.num_written += len(token_ids)
        while len(self.pages) * self._page_size < self.num_written:
            self.pages.append(self._free_pages.pop())
        new_pages = self.pages[self._announced :]
        self._announced = len(self.pages)
        return RowPlan(
            sequence_id=self.sequence_id,
            token_ids=list(token_ids),
            start=start,
            phase=phase,
            new_pages=new_pages,
            samples=samples,
        )


class Driver:
    """Hands out pages in random order and runs steps."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.page_size = runner.info.page_size
        self.free_pages = list(range(1, min(runner.info.num_pages, 4096)))
        random.Random(seed).shuffle(self.free_pages)
        self._ids = itertools.count(1)
        self._released: list[int] = []

    def sequence(self) -> DrivenSequence:
        """A new sequence without tokens."""
        return DrivenSequence(next(self._ids), self.page_size, self.free_pages)

    def release(self, sequence: DrivenSequence) -> None:
        """The next step releases the sequence; its pages are free again."""
        self._released.append(sequence.sequence_id)
        self.free_pages.extend(sequence.pages)

    def plan(self, rows: Sequence[RowPlan], copies: Sequence[PageCopy] = ()) -> StepPlan:
        """A step of these rows."""
        released, self._released = tuple(self._released), []
        return StepPlan(step=0, rows=tuple(rows), copies=tuple(copies), released=released)

    def logits(self, rows: Sequence[RowPlan], copies: Sequence[PageCopy] = ()) -> tuple[Tensor, ...]:
        """Logits of every token of each row."""
        return self.runner.token_logits(self.plan(rows, copies))

    def teacher_forced(self, token_ids: Sequence[int], chunk: int, num_prefilled: int | None = None) -> Tensor:
        """Logits of all tokens of a sequence, fp32 [len(token_ids), vocab_size]."""
        return torch.cat(list(self.teacher_forced_parts(token_ids, chunk, num_prefilled)))

    def teacher_forced_parts(
        self, token_ids: Sequence[int], chunk: int, num_prefilled: int | None = None
    ) -> Iterator[Tensor]:
        """The same step by step: the first `num_prefilled` tokens (default: all) in chunks, then one by one as decode
        steps."""
        prefilled = len(token_ids) if num_prefilled is None else num_prefilled
        sequence = self.sequence()
        for start in range(0, prefilled, chunk):
            tokens = token_ids[start : min(start + chunk, prefilled)]
            yield from self.logits([sequence.row(tokens, Phase.PREFILL)])
        for token_id in token_ids[prefilled:]:
            yield from self.logits([sequence.row([token_id], Phase.DECODE)])
        self.release(sequence)

    def generate(self, prompt: Sequence[int], num_tokens: int, chunk: int) -> list[int]:
        """Greedy ids after the prompt."""
        sequence = self.sequence()
        sampled: list[int] = []
        for start in range(0, len(prompt), chunk):
            tokens = prompt[start : start + chunk]
            last = start + chunk >= len(prompt)
            row = sequence.row(tokens, Phase.PREFILL, (sample_spec(),) if last else ())
            samples = self.runner.execute(self.plan([row])).samples[0]
            sampled.extend(ids_of(samples))
        while len(sampled) < num_tokens:
            row = sequence.row([sampled[-1]], Phase.DECODE, (sample_spec(),))
            sampled.extend(ids_of(self.runner.execute(self.plan([row])).samples[0]))
        self.release(sequence)
        return sampled
