"""Figures, their targets, and what a report prints."""

from __future__ import annotations

import sys

import msgspec
import pytest
import typer

from sapwood_bench.machine import this_machine
from sapwood_bench.report import Figure, Report, publish


@pytest.mark.parametrize(
    ("figure", "met", "target"),
    [
        (Figure(name="f", value=2.0, unit="x"), None, ""),
        (Figure(name="f", value=2.0, unit="x", at_least=2.0), True, ">= 2"),
        (Figure(name="f", value=1.99, unit="x", at_least=2.0), False, ">= 2"),
        (Figure(name="f", value=25.0, unit="s", at_most=25.0), True, "<= 25"),
        (Figure(name="f", value=25.1, unit="s", at_most=25.0), False, "<= 25"),
    ],
)
def test_a_figure_knows_whether_it_met_its_target(figure: Figure, met: bool | None, target: str) -> None:
    assert figure.met is met
    assert figure.target == target


def report(*figures: Figure) -> Report:
    return Report(bench="test", machine=this_machine(), settings={"model": "m"}, figures=figures)


def test_a_missed_target_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_:
        publish(report(Figure(name="speed", value=1.0, unit="x", at_least=2.0)), as_json=False)
    assert exit_.value.exit_code == 1
    assert "MISSED" in capsys.readouterr().out


def test_a_table_names_figures_settings_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    publish(report(Figure(name="speed", value=1234.5, unit="tokens/s", at_least=2.0)), as_json=False)
    printed = capsys.readouterr().out
    for part in ("speed", "1,234", "tokens/s", ">= 2", "met", "model m", "torch", "cores", "$ sapwood"):
        assert part in printed


def test_json_reads_back(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/any/where/sapwood", "bench", "speed", "--model", "a name"])
    made = report(Figure(name="speed", value=3.0, unit="x", at_least=2.0))
    publish(made, as_json=True)
    read = msgspec.json.decode(capsys.readouterr().out, type=Report)
    assert read.figures == made.figures
    assert read.machine == made.machine
    assert read.command == "sapwood bench speed --model 'a name'"
