"""The runner under `--deterministic`: the same logits, bit by bit, however its steps are cut and launched.

Needs what `--deterministic` asks of the environment (`CUBLAS_WORKSPACE_CONFIG`), so it is a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sapwood_bench.kernels.device import Device
from sapwood_bench.kernels.model_step import FULL_TRIAL, TINY_TRIAL, ModelTrial, RunnerBench, make_runner
from sapwood_bench.kernels.results import Check
from sapwood_server.model.runner import ModelRunner
from sapwood_server.values.plan import Phase, StepPlan

BATCHES = (1, 3, 8)
"""Rows of a decode step; 3 is padded to a graph of 4."""
CHUNK = 7
_DECODED = 3


def bits_trial(dry: bool) -> ModelTrial:
    """Two layers of the measured model, with room for the largest batch."""
    if dry:
        return replace(TINY_TRIAL, batches=((BATCHES[-1], 16),))
    config = replace(FULL_TRIAL.config, num_layers=2)
    return replace(FULL_TRIAL, config=config, max_batched_tokens=128, batches=((BATCHES[-1], 128),))


def check_bits(device: Device) -> Iterator[Check]:
    """One runner with graphs, where there are any, against one without; then chunks against a whole prompt."""
    trial = bits_trial(device.dry)
    captured, eager = (make_runner(trial, device, graphs, deterministic=True) for graphs in (True, False))
    zero = "" if not captured.kv_pages(0).any() else "it isn't zero"
    yield Check(name="page 0 after capture", problem=zero)
    vocab_size, num_tokens = trial.config.vocab_size, trial.max_batched_tokens
    prompt = [num_tokens // BATCHES[-1]]
    for count in BATCHES:
        ours, wanted = (step_logits(runner, vocab_size, count, prompt, 2) for runner in (captured, eager))
        yield Check(name=f"decode steps of {count}: graphs against none", problem=difference(ours, wanted))
    whole = step_logits(eager, vocab_size, 1, [num_tokens], 0)
    chunks = [CHUNK] * ((num_tokens - _DECODED) // CHUNK)
    rest = num_tokens - sum(chunks)
    ways = [
        (f"in chunks of {CHUNK}, the last of {rest}", [*chunks, rest], 0),
        (f"the last {rest} decoded", chunks, rest),
    ]
    # Not in a dry run: the CPU's fp16 product of one row may sum in another order than one of several.
    for name, sizes, decoded in ways[:1] if device.dry else ways:
        found = step_logits(captured, vocab_size, 1, sizes, decoded)
        yield Check(name=f"{num_tokens} tokens {name}", problem=difference(found, whole))


def step_logits(runner: ModelRunner, vocab_size: int, count: int, chunks: Sequence[int], decoded: int) -> Tensor:
    """Of every token of `count` sequences, fp32 [count * tokens, vocab_size]: prefilled in chunks, then decoded."""
    bench = RunnerBench(runner, vocab_size)
    sequences = bench.sequences(count, sum(chunks) + decoded)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for size, phase in [*((size, Phase.PREFILL) for size in chunks), *[(1, Phase.DECODE)] * decoded]:
        rows = []
        for number, sequence in enumerate(sequences):
            start = sequence.num_written
            ids = [(7919 * index + 31 * number + 1) % vocab_size for index in range(start, start + size)]
            rows.append(sequence.row(ids, phase))
        for part, logits in zip(parts, runner.token_logits(StepPlan(step=0, rows=tuple(rows))), strict=True):
            part.append(logits.clone())
    bench.release(sequences)
    return torch.cat([logits for part in parts for logits in part])


def difference(found: Tensor, wanted: Tensor) -> str:
    """In words, if any bit differs; empty if none does."""
    wrong = (found.view(torch.int32) != wanted.view(torch.int32)).sum().item()
    return f"{wrong} of {wanted.numel()} logits differ" if wrong else ""
