"""Time to first token with a long cached prefix, against the same prompt uncached."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer

from sapwood_bench.client import Timed, complete
from sapwood_bench.machine import this_machine
from sapwood_bench.report import Figure, Report, publish
from sapwood_bench.server_process import sapwood_server
from sapwood_bench.workload import PromptMaker
from sapwood_server.values.demo import DEMO_MODEL

TARGET_RATIO = 15.0
WARM_PER_COLD = 3
_ANSWER_TOKENS = 2  # the first is what is timed


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("ttft")(ttft)


def ttft(
    model: Annotated[str, typer.Option(help="Model to serve.")] = DEMO_MODEL,
    prefix: Annotated[int, typer.Option(help="Cached tokens.")] = 4000,
    suffix: Annotated[int, typer.Option(help="New tokens.")] = 50,
    repeats: Annotated[int, typer.Option(help="Cold runs; each is followed by three warm ones.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """TTFT cold and with a cached prefix, one server, interleaved; the ratio of the medians."""
    maker = PromptMaker(model, seed=11)
    cold: list[float] = []
    warm: list[float] = []
    machine = this_machine()
    with sapwood_server(model) as server:
        complete(server.base_url, maker.prompt(prefix + suffix), _ANSWER_TOKENS)  # each shape's one-off costs
        for _ in range(repeats):
            shared = maker.prompt(prefix)
            first = complete(server.base_url, shared + maker.prompt(suffix), _ANSWER_TOKENS)
            cold.append(_checked(first, cached=0, slack=suffix))
            for _ in range(WARM_PER_COLD):
                later = complete(server.base_url, shared + maker.prompt(suffix), _ANSWER_TOKENS)
                warm.append(_checked(later, cached=prefix, slack=suffix))
    medians = statistics.median(cold), statistics.median(warm)
    figures = (
        Figure(name="TTFT cold, median", value=medians[0] * 1e3, unit="ms"),
        Figure(name="TTFT cached, median", value=medians[1] * 1e3, unit="ms"),
        Figure(name="cold / cached", value=medians[0] / medians[1], unit="x", at_least=TARGET_RATIO),
    )
    settings = {"model": model, "prefix": prefix, "suffix": suffix, "cold runs": len(cold), "cached runs": len(warm)}
    publish(Report(bench="ttft", machine=machine, settings=settings, figures=figures), as_json=json)


def _checked(timed: Timed, *, cached: int, slack: int) -> float:
    """The TTFT, if the request found what it was meant to find: up to `slack` tokens more may match by chance."""
    if not cached <= timed.cached_tokens < cached + slack:
        raise RuntimeError(
            f"cached_tokens is {timed.cached_tokens}, meant to be {cached}: the figure would mean nothing"
        )
    return timed.ttft_seconds
