"""Runs the compile gate in processes of its own: the suite's own process has its kernels interpreted."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from support.imports import function_at, place_of
from support.source import ROOT

Case = TypeVar("Case")
Result = TypeVar("Result")


def in_gate_process(
    function: Callable[[Case], Result], cases: Sequence[Case], cache: Path, python: str = sys.executable
) -> list[Result]:
    """`function(case)` for each case, in one process without TRITON_INTERPRET; both must survive pickling.

    cache: where Triton keeps what it compiled, by a hash of source, versions and options, so that a second run, or
    another worker, compiles nothing again. Raises RuntimeError with the process' last words if it fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'kernels'}"}
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        order, answer = Path(folder, "order"), Path(folder, "answer")
        order.write_bytes(pickle.dumps(list(cases)))
        command = [python, "-m", "support.gate_process", *place_of(function), str(order), str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the gate's process ended with {done.returncode}: {done.stderr[-4000:]}")
        results: list[Result] = pickle.loads(answer.read_bytes())
        return results


def _main(file: str, name: str, order: str, answer: str) -> None:
    function = function_at((file, name))
    cases = pickle.loads(Path(order).read_bytes())
    Path(answer).write_bytes(pickle.dumps([function(case) for case in cases]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
