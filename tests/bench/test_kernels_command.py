"""`sapwood bench kernels` and `bench/gpu_check.sh` as a person calls them, where nothing can be measured."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sapwood_bench.kernels.results import ORDER
from sapwood_server.__main__ import main
from support.scale import suite_scale
from support.source import ROOT

SCRIPT = ROOT / "bench" / "gpu_check.sh"
SECONDS = 1200.0
DRY_STEPS = ORDER if suite_scale() == 1 else ("ceilings",)


def run_script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | variables
    return subprocess.run(
        [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.mark.parametrize("arguments", [["--quick", "--json"], ["--tune"]])
def test_without_a_gpu_there_is_one_line_and_exit_code_2(
    capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "kernels", *arguments])
    printed = capfd.readouterr()
    assert exit_.value.code == 2
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("sapwood bench kernels")
    assert re.search("nothing was (measured|tuned)", line)


@pytest.mark.parametrize("arguments", [["--compile-only"], ["--tune", "--json"], ["--tune", "--quick"]])
def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "kernels", *arguments])
    assert exit_.value.code == 2
    assert "--tune" in capsys.readouterr().err


def test_the_script_knows_every_step_and_its_time() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    (steps,) = re.findall(r"^steps=\((.*)\)$", text, re.MULTILINE)
    limits = {name: int(limit) for name, limit in (entry.split(":") for entry in steps.split())}
    assert tuple(limits) == ORDER
    assert all(limit >= 15 for limit in limits.values())
    (budget,) = re.findall(r"^budget=(\d+)$", text, re.MULTILINE)
    assert int(budget) <= 350
    assert sum(limits.values()) <= int(budget), sum(limits.values())
    (judged,) = re.findall(r'^judged=" (.*) "$', text, re.MULTILINE)
    assert judged.split() == ["decode", "prefill", "shared", "model"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_is_clean() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], "unknown argument '--nonsense'"),
        (["--step", "prefil"], "--step is 'prefil'; accepted: versions ceilings"),
        (["--step"], "--step needs a value"),
        (["--budget", "5m"], "--budget is '5m'; accepted: a whole number of seconds"),
        (["--out", "/dev/null/x"], "the results folder '/dev/null/x' can't be made"),
    ],
)
def test_a_wrong_command_line_ends_the_script_with_2(arguments: list[str], message: str) -> None:
    done = run_script(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_help_says_how_to_call_it() -> None:
    done = run_script("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--dry-run" in done.stdout


@pytest.mark.slow
def test_a_dry_run_leaves_a_report(tmp_path: Path) -> None:
    """At full scale every step of the script, as on a GPU but tiny."""
    steps = [word for step in DRY_STEPS for word in ("--step", step)]
    done = run_script("--dry-run", "--out", str(tmp_path), *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DRY RUN" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"gpu_check.json", "gpu_check.txt", "gpu_check.log"}
    report = (tmp_path / "gpu_check.txt").read_text(encoding="utf-8")
    for step in DRY_STEPS:
        assert f"step {step}: ok" in report


def test_a_step_that_dies_keeps_no_other_from_running(tmp_path: Path) -> None:
    """Here by a Python that dies in one step: the report has it as failed, and the exit code is 1."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"--step ceilings --seconds"*) kill -9 $$;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    out = tmp_path / "out"
    done = run_script("--dry-run", "--out", str(out), "--step", "ceilings", "--step", "versions", PYTHON=str(python))
    assert done.returncode == 1
    report = (out / "gpu_check.txt").read_text(encoding="utf-8")
    assert "step versions: ok" in report
    assert "step ceilings: FAILED" in report


def fake_python(tmp_path: Path, of_a_step: str) -> Path:
    """A Python in which the search for a GPU finds one, and a step is these lines of sh."""
    python = tmp_path / "python"
    cases = f'*kernels.device*) exit 0;; *"--seconds"*) {of_a_step};;'
    python.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_exit_code_2_of_a_step_is_a_failure_like_any(tmp_path: Path) -> None:
    """Only the search before the steps says that there is no GPU."""
    out = tmp_path / "out"
    python = fake_python(tmp_path, "exit 2")
    done = run_script("--out", str(out), "--step", "versions", "--step", "ops", PYTHON=str(python))
    assert done.returncode == 1
    assert "ops: ended with exit code 2" in done.stderr
    assert "step ops: FAILED" in (out / "gpu_check.txt").read_text(encoding="utf-8")


def test_without_a_gpu_the_script_ends_before_its_steps(tmp_path: Path) -> None:
    done = run_script("--out", str(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("nothing was measured")


def test_steps_of_targets_keep_their_time(tmp_path: Path) -> None:
    """With 200 s, 140 of them for those four: the others get what is left, and some are not run."""
    python = fake_python(tmp_path, "exit 1")
    done = run_script("--out", str(tmp_path / "out"), "--budget", "200", PYTHON=str(python))
    assert done.returncode == 1
    log = (tmp_path / "out" / "gpu_check.log").read_text(encoding="utf-8")
    limits = {name: int(limit) for name, limit in re.findall(r"^== (\w+), up to (\d+) s$", log, re.MULTILINE)}
    assert limits["correct"] <= 60
    for name, least in (("decode", 40), ("prefill", 30), ("shared", 30), ("model", 40)):
        assert limits[name] >= least


def test_ceilings_come_with_what_is_a_share_of_them(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "exit 1")
    done = run_script("--out", str(tmp_path / "out"), "--step", "decode", PYTHON=str(python))
    assert "step ceilings: FAILED" in done.stdout
