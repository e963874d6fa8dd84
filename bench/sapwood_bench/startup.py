"""From starting the server's process to the first token: on a cold disk cache without bytecode, and again."""

from __future__ import annotations

import os
import site
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from sapwood_bench.client import complete
from sapwood_bench.machine import this_machine
from sapwood_bench.report import Figure, Report, publish
from sapwood_bench.server_process import sapwood_server
from sapwood_bench.workload import PromptMaker
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.values.demo import DEMO_MODEL

FIRST_SECONDS = 25.0
LATER_SECONDS = 15.0


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("startup")(startup)


def startup(
    model: Annotated[str, typer.Option(help="Model to serve.")] = DEMO_MODEL,
    repeats: Annotated[int, typer.Option(help="Later starts.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Start to first token, as the first time (bytecode compiled anew, files read from disk) and later; the worst."""
    prompt = PromptMaker(model, seed=13).prompt(20)
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix="sapwood-bench-") as bytecode:
        environment = f"PYTHONPYCACHEPREFIX={bytecode}"
        forget_files(model)
        first = seconds_to_first_token(model, prompt, environment)
        later = [seconds_to_first_token(model, prompt, environment) for _ in range(repeats)]
    figures = (
        Figure(name="first start to first token", value=first, unit="s", at_most=FIRST_SECONDS),
        Figure(name="later starts, the slowest", value=max(later), unit="s", at_most=LATER_SECONDS),
    )
    settings = {"model": model, "later starts": repeats}
    publish(Report(bench="startup", machine=machine, settings=settings, figures=figures), as_json=json)


def seconds_to_first_token(model: str, prompt: tuple[int, ...], environment: str) -> float:
    """Starts a server, asks for one token as soon as it is ready, and stops it."""
    started = time.perf_counter()
    with sapwood_server(model, environment=(environment,)) as server:
        complete(server.base_url, prompt, 1)
        return time.perf_counter() - started


def forget_files(model: str) -> None:
    """Asks the system to drop the model's and the installed packages' files from its cache, as after a reboot."""
    location = resolve_model(model).location
    files = [location] if location.is_file() else [path for path in location.rglob("*") if path.is_file()]
    for folder in site.getsitepackages():
        files += [path for path in Path(folder).rglob("*") if path.suffix in (".so", ".py") and path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
