"""Runs a check where it may crash: a kernel that reads past its tensors in the interpreter ends the whole process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

from support.imports import function_at, place_of
from support.source import ROOT


def run_isolated(check: Callable[[], None]) -> None:
    """`check()`, a function at the top of a file, in a process of its own.

    Raises AssertionError with its last words, or with the signal that ended it.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-m", "support.isolated", *place_of(check)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        raise AssertionError(f"{check.__name__} was ended by {signal.Signals(-done.returncode).name}")
    if done.returncode:
        raise AssertionError(f"{check.__name__} failed: {done.stderr[-2000:]}")


if __name__ == "__main__":
    function_at((sys.argv[1], sys.argv[2]))()
