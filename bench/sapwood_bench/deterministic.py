"""What `--deterministic` costs: prefill and decode of the runner with and without it, in turn in one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import typer

from sapwood_bench.machine import this_machine
from sapwood_bench.report import Figure, Report, publish
from sapwood_server.config import ServerConfig, engine_environment
from sapwood_server.errors import StartupError
from sapwood_server.values.demo import DEMO_MODEL

PAIR_COMMAND = (sys.executable, "-m", "sapwood_bench.deterministic_speed")
PREFILLS = (256, 2048)
"""Tokens."""
DECODES = ((1, 100), (1, 1000), (8, 100))
"""(sequences, context in tokens)."""


class SpeedPair(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of one kind of work, medians of rounds."""

    name: str
    usual: float
    deterministic: float


class SpeedPairs(msgspec.Struct, frozen=True, kw_only=True):
    """What the measuring process answers."""

    dtype: str
    pairs: tuple[SpeedPair, ...]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("deterministic")(deterministic)


def deterministic(
    model: Annotated[str, typer.Option(help="Model to run.")] = DEMO_MODEL,
    device: Annotated[str, typer.Option(help="As the server's.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="As the server's.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Rounds; one more is dropped.")] = 3,
    steps: Annotated[int, typer.Option(help="Decode steps of a round.")] = 24,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Speed of the runner under --deterministic, beside its usual speed."""
    machine = this_machine()
    speeds = speed_pairs(ServerConfig(model=model, device=device, dtype=dtype, deterministic=True), repeats, steps)
    settings = {"model": model, "device": device, "dtype": speeds.dtype, "rounds": repeats, "steps": steps}
    report = Report(
        bench="deterministic", machine=machine, settings=settings, figures=tuple(pair_figures(speeds.pairs))
    )
    publish(report, as_json=json)


def speed_pairs(config: ServerConfig, repeats: int, steps: int) -> SpeedPairs:
    """Asks a process of its own, in the environment of an engine of `config`. Raises StartupError with its last line
    if it fails."""
    command = [*PAIR_COMMAND, config.model, config.device, config.dtype, str(repeats), str(steps)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=engine_environment(config)
    )
    if done.returncode:
        raise StartupError(f"{' '.join(command[1:])}: {done.stderr.decode().strip().splitlines()[-1:]}")
    return msgspec.json.decode(done.stdout, type=SpeedPairs)


def pair_figures(pairs: Iterable[SpeedPair]) -> Iterator[Figure]:
    """Both speeds, and how many times as long the deterministic one takes."""
    for pair in pairs:
        yield Figure(name=pair.name, value=pair.usual, unit="tokens/s")
        yield Figure(name=f"{pair.name}, deterministic", value=pair.deterministic, unit="tokens/s")
        yield Figure(name=f"{pair.name}, cost", value=pair.usual / pair.deterministic, unit="x")
