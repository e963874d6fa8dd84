"""`python -m sapwood_bench.deterministic_speed MODEL DEVICE DTYPE ROUNDS STEPS`: JSON for the bench `deterministic`.

A process of its own, so that the command line need not import torch.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterator

import msgspec

from sapwood_bench.deterministic import DECODES, PREFILLS, SpeedPair, SpeedPairs
from sapwood_bench.runner_speed import RunnerBench
from sapwood_bench.workload import PromptMaker
from sapwood_server.config import ServerConfig
from sapwood_server.model.load import load_runner

KV_MEMORY = "512MiB"
"""Two runners at once, and no more context than that."""


Work = Callable[[RunnerBench], float]
"""Seconds of it."""


def measure(model: str, device: str, dtype: str, rounds: int, steps: int) -> SpeedPairs:
    """Each kind of work on the one runner, then on the other, round by round; the first round is dropped."""
    prompts = PromptMaker(model, seed=3)
    configs = [
        ServerConfig(model=model, device=device, dtype=dtype, kv_memory=KV_MEMORY, deterministic=deterministic)
        for deterministic in (False, True)
    ]
    runners = [load_runner(config, lambda stage, fraction: None) for config in configs]
    benches = [RunnerBench(runner, prompts) for runner in runners]
    pairs = []
    for name, num_tokens, work in _kinds(steps):
        taken = [[work(bench) for bench in benches] for _ in range(rounds + 1)][1:]
        usual, deterministic = (num_tokens / statistics.median(column) for column in zip(*taken, strict=True))
        pairs.append(SpeedPair(name=name, usual=usual, deterministic=deterministic))
    return SpeedPairs(dtype=runners[0].info.dtype, pairs=tuple(pairs))


def _kinds(steps: int) -> Iterator[tuple[str, int, Work]]:
    """(name, tokens, work)."""
    for size in PREFILLS:
        yield f"prefill, {size} tokens", size, functools.partial(_prefill, size)
    for count, context in DECODES:
        yield f"decode, {count} at {context} tokens", count, functools.partial(_decode, count, context, steps)


def _prefill(num_tokens: int, bench: RunnerBench) -> float:
    return sum(bench.prefill(num_tokens))


def _decode(num_sequences: int, context: int, steps: int, bench: RunnerBench) -> float:
    return bench.decode(num_sequences, context, steps)


if __name__ == "__main__":
    model, device, dtype, rounds, steps = sys.argv[1:]
    sys.stdout.buffer.write(msgspec.json.encode(measure(model, device, dtype, int(rounds), int(steps))))
