"""The process in which `support.mutants` judges mutants: it imports what is slow once, then forks for each of them."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from support.imports import function_at

_PRELOADED = ("hypothesis", "numpy", "pytest", "torch", "triton", "triton.language")
_PASSED, _FAILED, _NOT_IMPORTED = 0, 10, 11
_ENDS = {_PASSED: "passed", _FAILED: "failed", _NOT_IMPORTED: "not imported"}


class _Substitute(importlib.abc.MetaPathFinder):
    """Finds the copy in place of the module, for whoever imports it."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self.path) if fullname == self.name else None


def main() -> None:
    """Reads an order from standard input and prints one line: how each case ended."""
    order = json.loads(sys.stdin.read())
    for name in _PRELOADED:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.startswith("sapwood_")]
    if ours:
        raise RuntimeError(f"imported before any substitute could take their places: {ours}")
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what checks print must not mix with the answer
    limit = float(order["timeout_seconds"])
    slowest, ends = 0.0, []
    for number, case in enumerate(order["cases"]):
        unbroken = number < order["num_unbroken"]
        begun = time.monotonic()
        # A busy machine must not look like a mutant that hangs.
        ends.append(_fork(order, case, 5 * limit if unbroken else max(limit, 3 * slowest)))
        slowest = max(slowest, time.monotonic() - begun) if unbroken else slowest
    print(json.dumps(ends), file=output, flush=True)


def _fork(order: dict[str, Any], case: dict[str, str], limit: float) -> dict[str, str]:
    """How the checks ended on one copy, within `limit` seconds, and by what."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as report:
        child = os.fork()
        if child == 0:
            os._exit(_run(order, case["module"], case["path"], Path(report.name)))
        deadline = time.monotonic() + limit
        pid, status = os.waitpid(child, os.WNOHANG)
        while pid == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
            pid, status = os.waitpid(child, os.WNOHANG)
        if pid == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"end": "failed", "how": "timeout"}
        if os.WIFSIGNALED(status):
            return {"end": "failed", "how": signal.Signals(os.WTERMSIG(status)).name}
        code = os.WEXITSTATUS(status)
        return {"end": _ENDS.get(code, "failed"), "how": report.read() or ("" if code == _PASSED else f"exit {code}")}


def _run(order: dict[str, Any], name: str, path: str, report: Path) -> int:
    """In the fork: the exit status that says how the checks ended."""
    sys.meta_path.insert(0, _Substitute(name, path))
    stage = _NOT_IMPORTED
    try:
        module = importlib.import_module(name)
        if module.__file__ != path:
            raise RuntimeError(f"{name} was imported from {module.__file__}, not from {path}")
        checks = function_at(order["checks"])
        stage = _FAILED
        checks(module)
    except BaseException as error:  # noqa: BLE001 - whatever a mutant raises, it was noticed
        report.write_text("".join(traceback.format_exception(error)[-3:]), encoding="utf-8")
        return stage
    return _PASSED


if __name__ == "__main__":
    main()
