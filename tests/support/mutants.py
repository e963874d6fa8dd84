"""Breaks a module on purpose, in a copy, and asks whether its tests notice.

    MUTANTS = [Mutant("sapwood_kernels.fold", old="tl.maximum(maximum, other_maximum)", new="maximum")]

    def checks(module: ModuleType) -> None:
        check_fold_equals_one_softmax(module.fold)

    def test_the_checks_notice_a_broken_kernel() -> None:
        assert survivors(MUTANTS, checks) == []

Each mutant runs in a process of its own, in which every import of the module gives the broken copy, whoever imports
it: a mutant of `fold` may so be judged by the checks of a kernel that folds. A crash counts as noticed. The checks
first run on an unbroken copy and must pass, so that a harness that fails on everything proves nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from support.imports import Place, place_of
from support.source import ROOT

TIMEOUT_SECONDS = 60.0
"""Of one mutant's checks, since a mutant may loop for ever: far more than they take, or three times as much as they
took on the unbroken copy, which has five times as long."""


@dataclass(frozen=True)
class Mutant:
    """One replacement in a module's source."""

    module: str
    old: str
    """Occurs exactly once in the source; give it enough of its line, or lines, to be the only one."""
    new: str

    def source(self) -> str:
        """The broken source. Raises ValueError if `old` isn't there exactly once, or if the result isn't Python."""
        text = module_path(self.module).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.old!r} occurs {count} times in {self.module}; accepted: exactly once")
        if self.old == self.new:
            raise ValueError(f"{self.old!r} is replaced by itself in {self.module}")
        source = text.replace(self.old, self.new)
        try:
            compile(source, self.module, "exec")
        except SyntaxError as error:
            raise ValueError(f"{self.module} with {self.new!r} isn't Python: {error}") from error
        return source


@dataclass(frozen=True)
class Outcome:
    """What the checks made of one mutant."""

    mutant: Mutant
    killed: bool
    how: str
    """The exception's last line, the signal, or "timeout"; empty for a mutant that lived."""


def run_mutants(
    mutants: Sequence[Mutant], checks: Callable[[ModuleType], None], timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Outcome]:
    """Runs `checks(broken module)` for each mutant, in Triton's interpreter, in the order given.

    `checks` is a function at the top of a file; it is imported anew in the mutant's process. Raises ValueError for a
    mutant that can't be made or imported, RuntimeError if the checks fail on an unbroken copy.
    """
    place = place_of(checks)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        names = sorted({mutant.module for mutant in mutants})
        copies = [(name, module_path(name).read_text(encoding="utf-8")) for name in names]
        copies += [(mutant.module, mutant.source()) for mutant in mutants]
        cases = []
        for number, (name, source) in enumerate(copies):
            path = Path(folder, str(number), f"{name.rpartition('.')[2]}.py")
            path.parent.mkdir()
            path.write_text(source, encoding="utf-8")
            cases.append({"module": name, "path": str(path)})
        ends = _judge(cases, len(names), place, timeout_seconds)
    for name, end in zip(names, ends, strict=False):
        if end["end"] != "passed":
            raise RuntimeError(f"the checks fail on an unbroken copy of {name}: {end['how']}")
    outcomes = []
    for mutant, end in zip(mutants, ends[len(names) :], strict=True):
        if end["end"] == "not imported":
            raise ValueError(f"{mutant} can't be imported: {end['how']}")
        outcomes.append(Outcome(mutant, end["end"] == "failed", end["how"]))
    return outcomes


def survivors(
    mutants: Sequence[Mutant], checks: Callable[[ModuleType], None], timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Mutant]:
    """The mutants that the checks did not notice; see `run_mutants`."""
    return [outcome.mutant for outcome in run_mutants(mutants, checks, timeout_seconds) if not outcome.killed]


def module_path(name: str) -> Path:
    """The file of a module, which is not imported for it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no module {name}")
    return Path(spec.origin)


def _judge(
    cases: list[dict[str, str]], num_unbroken: int, checks: Place, timeout_seconds: float
) -> list[dict[str, str]]:
    """One process imports torch and Triton once and forks for each case; see `support.mutant_process`."""
    order = {
        "num_unbroken": num_unbroken,
        "checks": checks,
        "timeout_seconds": timeout_seconds,
        "cases": cases,
    }
    # One thread each: a fork takes along only the thread that asked for it.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = os.environ | threads | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, "-m", "support.mutant_process"],
        input=json.dumps(order),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process that judges mutants failed: {done.stderr[-2000:]}")
    ends: list[dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return ends
