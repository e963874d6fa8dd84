"""The runner alone, without scheduler and HTTP: prefill and decode on the CPU, beside transformers in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from sapwood_bench.machine import this_machine
from sapwood_bench.peers import transformers_speeds
from sapwood_bench.report import Figure, Report, publish
from sapwood_bench.workload import PromptMaker
from sapwood_server.config import ServerConfig
from sapwood_server.model.load import load_runner
from sapwood_server.model.runner import ModelRunner
from sapwood_server.values.demo import DEMO_MODEL
from sapwood_server.values.plan import Phase, RowPlan, SampleSpec, StepPlan
from sapwood_server.values.sampling import SamplingParams

_PREFILL_TOKENS = 3019
_DECODES = ((1, 100), (1, 1000), (1, 3000), (4, 100), (4, 1000), (16, 100), (16, 1000))
"""(sequences, context)."""
_STEP_SECONDS = 0.5
"""What a step may take with the default --max-batched-tokens."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("cpu-speed")(cpu_speed)


def cpu_speed(
    model: Annotated[str, typer.Option(help="Model to run.")] = DEMO_MODEL,
    dtype: Annotated[str, typer.Option(help="As the server's.")] = "auto",
    transformers: Annotated[bool, typer.Option(help="Measure transformers as well.")] = True,
    repeats: Annotated[int, typer.Option(help="Rounds; a first one is dropped.")] = 3,
    steps: Annotated[int, typer.Option(help="Decode steps of a round.")] = 48,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prefill and decode speed of the runner, in tokens per second; medians of rounds."""
    machine = this_machine()
    runner = load_runner(ServerConfig(model=model, dtype=dtype), lambda stage, fraction: None)
    bench = _Bench(runner, PromptMaker(model, seed=3))
    prefills = [bench.prefill(_PREFILL_TOKENS) for _ in range(repeats + 1)][1:]
    prefill = _PREFILL_TOKENS / statistics.median(sum(seconds) for seconds in prefills)
    figures = [
        Figure(name=f"prefill, {_PREFILL_TOKENS} tokens", value=prefill, unit="tokens/s"),
        Figure(
            name="longest prefill step",
            value=statistics.median(max(seconds) for seconds in prefills),
            unit="s",
            at_most=_STEP_SECONDS,
        ),
    ]
    decodes = {}
    for num_sequences, context in _DECODES:
        rounds = [bench.decode(num_sequences, context, steps) for _ in range(repeats)]
        speed = decodes[num_sequences, context] = num_sequences / statistics.median(rounds)
        name = f"decode, {num_sequences} at {context} tokens"
        figures.append(Figure(name=name, value=speed, unit="tokens/s"))
    if transformers:
        peer = transformers_speeds(model, repeats, steps)
        for name, ours, theirs in (
            ("prefill", prefill, peer.prefill),
            ("decode at 100", decodes[1, 100], peer.decode_short),
            ("decode at 3000", decodes[1, 3000], peer.decode_long),
        ):
            figures.append(Figure(name=f"transformers fp32, {name}", value=theirs, unit="tokens/s"))
            figures.append(Figure(name=f"ours / transformers, {name}", value=ours / theirs, unit="x", at_least=1.0))
    info = runner.info
    settings = {
        "model": model,
        "dtype": info.dtype,
        "chunk": info.max_batched_tokens,
        "repeats": repeats,
        "steps": steps,
    }
    publish(Report(bench="cpu-speed", machine=machine, settings=settings, figures=tuple(figures)), as_json=json)


@dataclass
class _Sequence:
    """Tokens written so far, in consecutive pages from `first_page` on."""

    sequence_id: int
    first_page: int
    num_written: int = 0

    def row(self, token_ids: Sequence[int], phase: Phase, page_size: int) -> RowPlan:
        """The next tokens; greedy sampling after the last."""
        start = self.num_written
        self.num_written += len(token_ids)
        pages = range(self.first_page + -(-start // page_size), self.first_page + -(-self.num_written // page_size))
        spec = SampleSpec(
            choice_key=self.sequence_id,
            choice=0,
            sampling=SamplingParams(temperature=0.0),
            prompt_ids=(),
            output_ids=(),
        )
        return RowPlan(
            sequence_id=self.sequence_id,
            token_ids=token_ids,
            start=start,
            phase=phase,
            new_pages=pages,
            samples=(spec,),
        )


class _Bench:
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
            rows = [sequence.row([7 + step], Phase.DECODE, self._page_size) for sequence in sequences]
            seconds.append(self._timed(rows))
        self._release(sequences)
        return statistics.median(seconds[1:])  # the first makes what the others use

    def _sequence(self, first_page: int) -> _Sequence:
        self._next_id += 1
        return _Sequence(self._next_id, first_page)

    def _prefill(self, sequence: _Sequence, num_tokens: int) -> list[float]:
        prompt, chunk = self._prompts.prompt(num_tokens), self._runner.info.max_batched_tokens
        chunks = [prompt[start : start + chunk] for start in range(0, num_tokens, chunk)]
        return [self._timed([sequence.row(tokens, Phase.PREFILL, self._page_size)]) for tokens in chunks]

    def _timed(self, rows: Sequence[RowPlan]) -> float:
        plan = StepPlan(step=0, rows=tuple(rows))
        started = time.perf_counter()
        self._runner.execute(plan)
        return time.perf_counter() - started

    def _release(self, sequences: Sequence[_Sequence]) -> None:
        released = tuple(sequence.sequence_id for sequence in sequences)
        self._runner.execute(StepPlan(step=0, rows=(), released=released))


if __name__ == "__main__":
    typer.run(cpu_speed)
