"""A bench's result: named figures with units and targets, as a table for people or as JSON."""

from __future__ import annotations

import shlex
import sys

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from sapwood_bench.machine import Machine

_WIDTH = 120


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the value is within its target; None if it has none."""
        if self.at_least is None and self.at_most is None:
            return None
        over = self.at_least is None or self.value >= self.at_least
        return over and (self.at_most is None or self.value <= self.at_most)

    @property
    def target(self) -> str:
        """The target in words; empty if there is none."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run."""

    bench: str
    machine: Machine
    settings: dict[str, object]
    figures: tuple[Figure, ...]
    command: str = ""
    """The command line that made it."""


def publish(report: Report, *, as_json: bool) -> None:
    """Prints the report, and exits with code 1 if a figure misses its target."""
    report = msgspec.structs.replace(report, command=shlex.join(["sapwood", *sys.argv[1:]]))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        _print_table(report)
    if any(figure.met is False for figure in report.figures):
        raise typer.Exit(1)


def _print_table(report: Report) -> None:
    machine = report.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    console = Console(highlight=False, soft_wrap=True, width=_WIDTH)
    console.print(f"$ {report.command}", markup=False)
    console.print(
        f"{machine.cpu}, {machine.cores} cores, {' '.join(machine.vector_flags)}; load {machine.load_average}"
    )
    console.print(f"{machine.system}, Python {machine.python}, {packages}; {machine.date}")
    console.print("; ".join(f"{name} {value}" for name, value in report.settings.items()), markup=False)
    table = Table(box=box.MARKDOWN)
    for heading in ("figure", "value", "unit", "target", ""):
        table.add_column(heading, justify="right" if heading == "value" else "left", no_wrap=True)
    for figure in report.figures:
        verdict = {True: "met", False: "MISSED", None: ""}[figure.met]
        table.add_row(figure.name, _number(figure.value), figure.unit, figure.target, verdict)
    console.print(table)


def _number(value: float) -> str:
    """Four significant digits, but never fewer than there are before the point: 16,320 and 0.1235."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
