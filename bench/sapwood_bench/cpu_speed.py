"""The runner alone, without scheduler and HTTP: prefill and decode on the CPU; then transformers, in the same run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from sapwood_bench.machine import this_machine
from sapwood_bench.peers import Speeds, measure
from sapwood_bench.report import Figure, Report, publish
from sapwood_bench.transformers_process import transformers_process
from sapwood_bench.workload import PromptMaker
from sapwood_server.errors import StartupError
from sapwood_server.values.demo import DEMO_MODEL

RUNNER_COMMAND = (sys.executable, "-m", "sapwood_bench.runner_speed")
PREFILL_TOKENS = 3019
DECODES = ((1, 100), (1, 1000), (1, 3000), (4, 100), (4, 1000), (16, 100), (16, 1000))
"""(sequences, context in tokens)."""
STEP_SECONDS = 0.5
"""What a step may take with the default --max-batched-tokens."""


class DecodeSpeed(msgspec.Struct, frozen=True):
    """Tokens per second of all sequences together."""

    num_sequences: int
    context: int
    tokens_per_second: float


class RunnerSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What the measuring process answers, medians of rounds; `prefill` in tokens per second."""

    dtype: str
    max_batched_tokens: int
    prefill: float
    longest_prefill_step_seconds: float
    decodes: tuple[DecodeSpeed, ...]

    def decode(self, context: int) -> float:
        """Tokens per second of a single sequence."""
        return next(d.tokens_per_second for d in self.decodes if (d.num_sequences, d.context) == (1, context))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("cpu-speed")(cpu_speed)


def cpu_speed(
    model: Annotated[str, typer.Option(help="Model to run.")] = DEMO_MODEL,
    dtype: Annotated[str, typer.Option(help="As the server's.")] = "auto",
    transformers: Annotated[bool, typer.Option(help="Measure transformers as well.")] = True,
    repeats: Annotated[int, typer.Option(help="Rounds; of prefill, one more is dropped.")] = 3,
    steps: Annotated[int, typer.Option(help="Decode steps of a round.")] = 48,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prefill and decode speed of the runner, in tokens per second; medians of rounds."""
    machine = this_machine()
    speeds = runner_speeds(model, dtype, repeats, steps)
    figures = list(own_figures(speeds))
    if transformers:
        with transformers_process(model) as ask:
            peer = measure({"transformers": ask}, PromptMaker(model, seed=15), repeats, steps)
        figures += compare(speeds, peer["transformers"])
    settings = {
        "model": model,
        "dtype": speeds.dtype,
        "chunk": speeds.max_batched_tokens,
        "rounds": repeats,
        "steps": steps,
    }
    publish(Report(bench="cpu-speed", machine=machine, settings=settings, figures=tuple(figures)), as_json=json)


def runner_speeds(model: str, dtype: str, repeats: int, steps: int) -> RunnerSpeeds:
    """Asks a process of its own. Raises StartupError with its last line if it fails."""
    command = [*RUNNER_COMMAND, model, dtype, str(repeats), str(steps)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise StartupError(f"{' '.join(command[1:])}: {done.stderr.decode().strip().splitlines()[-1:]}")
    return msgspec.json.decode(done.stdout, type=RunnerSpeeds)


def own_figures(speeds: RunnerSpeeds) -> Iterator[Figure]:
    """The runner's speeds, and how long the longest step of a prefill takes."""
    yield Figure(name=f"prefill, {PREFILL_TOKENS} tokens", value=speeds.prefill, unit="tokens/s")
    longest = speeds.longest_prefill_step_seconds
    yield Figure(name="longest prefill step of a prompt, median", value=longest, unit="s", at_most=STEP_SECONDS)
    for decode in speeds.decodes:
        name = f"decode, {decode.num_sequences} at {decode.context} tokens"
        yield Figure(name=name, value=decode.tokens_per_second, unit="tokens/s")


def compare(speeds: RunnerSpeeds, peer: Speeds) -> Iterator[Figure]:
    """transformers' speeds, and ours over them."""
    for name, ours, theirs in (
        ("prefill", speeds.prefill, peer.prefill),
        ("decode at 100", speeds.decode(100), peer.decode_short),
        ("decode at 3000", speeds.decode(3000), peer.decode_long),
    ):
        yield Figure(name=f"transformers fp32, {name}", value=theirs, unit="tokens/s")
        yield Figure(name=f"ours / transformers, {name}", value=ours / theirs, unit="x", at_least=1.0)
