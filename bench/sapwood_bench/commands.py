"""`sapwood bench ...`: every figure in bench/RESULTS.md is made by one of these."""

from __future__ import annotations

import signal
import sys

import typer

from sapwood_bench import cpu_speed, deterministic, drift, overhead, peers, shared_prefix, startup, ttft
from sapwood_bench.kernels import command as kernels

_MODULES = (overhead, cpu_speed, ttft, shared_prefix, startup, peers, drift, deterministic, kernels)
_ALL = (
    overhead.overhead,
    cpu_speed.cpu_speed,
    ttft.ttft,
    shared_prefix.shared_prefix,
    startup.startup,
    peers.peers,
    drift.drift,
    deterministic.deterministic,
)


def register(app: typer.Typer) -> None:
    """Adds the group."""
    bench = typer.Typer(no_args_is_help=True)
    bench.callback()(_end_servers_with_us)
    for module in _MODULES:
        module.register(bench)
    bench.command("all")(run_all)
    app.add_typer(bench, name="bench")


def _end_servers_with_us() -> None:
    """Measure this machine: each bench prints a table, or JSON."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # as Ctrl-C: servers are stopped on the way


def run_all() -> None:
    """Run every bench that needs no GPU, with its defaults; exit with code 1 if any figure misses its target."""
    missed = False
    for run in _ALL:
        try:
            run()
        except typer.Exit:
            missed = True
    if missed:
        raise typer.Exit(1)
