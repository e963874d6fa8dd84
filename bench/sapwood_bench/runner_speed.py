"""`python -m sapwood_bench.runner_speed MODEL DTYPE ROUNDS STEPS`: times the runner alone, prints JSON for `cpu_speed`.

A process of its own, so that the command line need not import torch.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import msgspec

from sapwood_bench.cpu_speed import DECODES, PREFILL_TOKENS, DecodeSpeed, RunnerSpeeds
from sapwood_bench.run_sequence import RunSequence
from sapwood_bench.workload import PromptMaker
from sapwood_server.config import ServerConfig
from sapwood_server.model.load import load_runner
from sapwood_server.model.runner import ModelRunner
from sapwood_server.values.plan import Phase, RowPlan, StepPlan


def measure(model: str, dtype: str, rounds: int, steps: int) -> RunnerSpeeds:
    """Medians of rounds; prefill's first round is dropped."""
    runner = load_runner(ServerConfig(model=model, dtype=dtype), lambda stage, fraction: None)
    bench = RunnerBench(runner, PromptMaker(model, seed=3))
    prefills = [bench.prefill(PREFILL_TOKENS) for _ in range(rounds + 1)][1:]
    decodes = []
    for num_sequences, context in DECODES:
        seconds = statistics.median(bench.decode(num_sequences, context, steps) for _ in range(rounds))
        decodes.append(DecodeSpeed(num_sequences, context, num_sequences / seconds))
    return RunnerSpeeds(
        dtype=runner.info.dtype,
        max_batched_tokens=runner.info.max_batched_tokens,
        prefill=PREFILL_TOKENS / statistics.median(sum(seconds) for seconds in prefills),
        longest_prefill_step_seconds=statistics.median(max(seconds) for seconds in prefills),
        decodes=tuple(decodes),
    )


class RunnerBench:
    """Runs sequences to measure them; none outlives its measurement."""

    def __init__(self, runner: ModelRunner, prompts: PromptMaker) -> None:
        self._runner = runner
        self._prompts = prompts
        self._page_size = runner.info.page_size
        self._next_id = 1

    def prefill(self, num_tokens: int) -> list[float]:
        """Seconds of each step of a prompt in chunks of the default size."""
        sequence = self._sequence(first_page=1)
        seconds = self._prefill(sequence, num_tokens)
        self._release([sequence])
        return seconds

    def decode(self, num_sequences: int, context: int, steps: int) -> float:
        """Median seconds of a step in which each sequence decodes a token, the contexts growing from `context`."""
        pages_each = -(-(context + steps + 1) // self._page_size)
        sequences = [self._sequence(first_page=1 + index * pages_each) for index in range(num_sequences)]
        for sequence in sequences:
            self._prefill(sequence, context)
        seconds = []
        for step in range(steps + 1):
            rows = [sequence.row([7 + step], Phase.DECODE) for sequence in sequences]
            seconds.append(self._timed(rows))
        self._release(sequences)
        return statistics.median(seconds[1:])  # the first makes what the others use

    def _sequence(self, first_page: int) -> RunSequence:
        self._next_id += 1
        return RunSequence(self._next_id, first_page, self._page_size)

    def _prefill(self, sequence: RunSequence, num_tokens: int) -> list[float]:
        prompt, chunk = self._prompts.prompt(num_tokens), self._runner.info.max_batched_tokens
        chunks = [prompt[start : start + chunk] for start in range(0, num_tokens, chunk)]
        return [self._timed([sequence.row(tokens, Phase.PREFILL)]) for tokens in chunks]

    def _timed(self, rows: Sequence[RowPlan]) -> float:
        plan = StepPlan(step=0, rows=tuple(rows))
        started = time.perf_counter()
        self._runner.execute(plan)
        return time.perf_counter() - started

    def _release(self, sequences: Sequence[RunSequence]) -> None:
        released = tuple(sequence.sequence_id for sequence in sequences)
        self._runner.execute(StepPlan(step=0, rows=(), released=released))


if __name__ == "__main__":
    model, dtype, rounds, steps = sys.argv[1:]
    sys.stdout.buffer.write(msgspec.json.encode(measure(model, dtype, int(rounds), int(steps))))
