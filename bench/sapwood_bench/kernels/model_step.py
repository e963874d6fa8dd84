"""A whole model of Llama-3.1-8B's shape with random weights: prefill and decode steps of the runner.

Times are wall time of `ModelRunner.execute`, the host's planning and the wait for the sampled ids included: what a
token costs a server before scheduling and HTTP.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sapwood_bench.kernels.device import Device
from sapwood_bench.kernels.results import Row
from sapwood_bench.run_sequence import RunSequence
from sapwood_server.model.config import ModelConfig, RopeScaling
from sapwood_server.model.device_runner import RandomModel, make_random_runner
from sapwood_server.model.device_step import DeviceLimits
from sapwood_server.model.devices import choose_device, read_device_facts
from sapwood_server.model.runner import ModelRunner
from sapwood_server.model.warm_up import warm_up
from sapwood_server.values.plan import FailedDraw, Phase, RowPlan, StepPlan

PAGE_SIZE = 16
_BF16 = 2


@dataclass(frozen=True, kw_only=True)
class ModelTrial:
    """What is run."""

    config: ModelConfig
    dtype: torch.dtype
    max_batched_tokens: int
    batches: tuple[tuple[int, int], ...]
    """(sequences, context in tokens) of decode steps."""
    steps: int
    """Of each batch, after those that are dropped."""


LLAMA_8B = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(
        kind="llama3", factor=8.0, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    sliding_window=None,
)
TINY = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    sliding_window=None,
)
FULL_TRIAL = ModelTrial(
    config=LLAMA_8B,
    dtype=torch.bfloat16,
    max_batched_tokens=2048,
    batches=((1, 1024), (1, 16_384), (8, 1024), (64, 1024)),
    steps=30,
)
TINY_TRIAL = ModelTrial(config=TINY, dtype=torch.float16, max_batched_tokens=16, batches=((1, 16), (2, 16)), steps=1)
_DROPPED_STEPS = 3


def matrix_parameters(config: ModelConfig) -> int:
    """Elements of the matrices that every token is multiplied with, the head included; the embedding is only looked
    up, a row a token."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def step_bytes(config: ModelConfig, num_sequences: int, context: int) -> int:
    """Read by a decode step at the least: every matrix once, and every key and value that a sequence sees."""
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * _BF16
    return matrix_parameters(config) * _BF16 + num_sequences * (context + 1) * per_token


def chunk_flops(config: ModelConfig, num_tokens: int) -> int:
    """Of a prompt's first chunk: two for each parameter and token (the head runs for the last one only), and the
    causal attention's."""
    head = config.vocab_size * config.hidden_size
    layers = matrix_parameters(config) - head
    pairs = num_tokens * (num_tokens + 1) // 2
    attention = config.num_layers * 4 * config.num_heads * config.head_dim * pairs
    return 2 * (layers * num_tokens + head) + attention


def measure_model(device: Device, graphs: bool) -> Iterator[Row]:
    """Prefill of a chunk, then decode steps, by a runner of its own."""
    trial = TINY_TRIAL if device.dry else FULL_TRIAL
    runner = make_runner(trial, device, graphs)
    bench = RunnerBench(runner, trial.config.vocab_size)
    how = "graph" if graphs else "no graph"
    if not graphs:
        chunk = trial.max_batched_tokens
        us = statistics.median(bench.prefill_us(chunk) for _ in range(4))
        yield Row(
            table="model",
            name=f"prefill step, {chunk} tokens",
            us=us,
            num_bytes=matrix_parameters(trial.config) * _BF16,
            flops=chunk_flops(trial.config, chunk),
        )
    for num_sequences, context in trial.batches:
        us = statistics.median(bench.decode_us(num_sequences, context, trial.steps))
        label = f"{context // 1024}k" if context >= 1024 else str(context)
        middle = context + trial.steps // 2
        yield Row(
            table="model",
            name=f"decode step, {num_sequences} x {label}, {how}",
            us=us,
            num_bytes=step_bytes(trial.config, num_sequences, middle),
            flops=2 * num_sequences * matrix_parameters(trial.config),
        )


def make_runner(trial: ModelTrial, device: Device, graphs: bool, deterministic: bool = False) -> ModelRunner:
    """Warmed up, with its graphs captured."""
    most = max(count for count, _ in trial.batches)
    longest = max(context for _, context in trial.batches) + trial.steps + _DROPPED_STEPS + 1
    tokens = max(count * (context + trial.steps + _DROPPED_STEPS + 1) for count, context in trial.batches)
    limits = DeviceLimits(
        num_tokens=max(trial.max_batched_tokens, most),
        num_sequences=most,
        max_model_len=max(longest, trial.max_batched_tokens),
        page_size=PAGE_SIZE,
        num_pages=1 + most + -(-max(tokens, 2 * trial.max_batched_tokens + 4) // PAGE_SIZE),
    )
    choice = choose_device("interpreter" if device.dry else "cuda", read_device_facts())
    runner = make_random_runner(
        RandomModel(
            config=trial.config,
            device=choice,
            dtype=trial.dtype,
            limits=limits,
            deterministic=deterministic,
            graphs=graphs,
        )
    )
    warm_up(runner)
    runner.capture_graphs()
    return runner


class RunnerBench:
    """Runs sequences to measure steps; none outlives its measurement."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._next_id = 1

    def prefill_us(self, num_tokens: int) -> float:
        """A prompt's first chunk."""
        sequence = self._sequence(first_page=1)
        us = self._step_us([sequence.row(self._tokens(num_tokens), Phase.PREFILL)])
        self.release([sequence])
        return us

    def decode_us(self, num_sequences: int, context: int, steps: int) -> list[float]:
        """Steps in which each sequence decodes a token, contexts growing from `context`."""
        sequences = self.sequences(num_sequences, context + steps + _DROPPED_STEPS + 1)
        chunk = self._runner.info.max_batched_tokens
        for sequence in sequences:
            for start in range(0, context, chunk):
                self._step_us([sequence.row(self._tokens(min(chunk, context - start)), Phase.PREFILL)])
        taken = []
        for _ in range(_DROPPED_STEPS + steps):
            taken.append(self._step_us([sequence.row(self._tokens(1), Phase.DECODE) for sequence in sequences]))
        self.release(sequences)
        return taken[_DROPPED_STEPS:]

    def sequences(self, count: int, num_tokens: int) -> list[RunSequence]:
        """New ones, each with pages for so many tokens."""
        pages_each = -(-num_tokens // PAGE_SIZE)
        return [self._sequence(first_page=1 + index * pages_each) for index in range(count)]

    def _sequence(self, first_page: int) -> RunSequence:
        self._next_id += 1
        return RunSequence(self._next_id, first_page, PAGE_SIZE)

    def _tokens(self, count: int) -> list[int]:
        return [(7919 * (index + self._next_id)) % self._vocab_size for index in range(count)]

    def _step_us(self, rows: Sequence[RowPlan]) -> float:
        """Raises RuntimeError if a draw fails: the numbers would be of a broken model."""
        started = time.perf_counter()
        result = self._runner.execute(StepPlan(step=0, rows=tuple(rows)))
        taken = (time.perf_counter() - started) * 1e6
        for draw in (draw for samples in result.samples for draw in samples):
            if isinstance(draw, FailedDraw):
                raise RuntimeError(f"a step failed: {draw.failure.value}")
        return taken

    def release(self, sequences: Sequence[RunSequence]) -> None:
        """Their pages are free again."""
        released = tuple(sequence.sequence_id for sequence in sequences)
        self._runner.execute(StepPlan(step=0, rows=(), released=released, ended_choices=released))
