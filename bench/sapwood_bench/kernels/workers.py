"""Checks in several processes, so that one that dies takes few others with it and kernels compile side by side."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from sapwood_bench.kernels.checks import CHECKS
from sapwood_bench.kernels.device import measured_device
from sapwood_bench.kernels.errors import MEASURE_ERRORS
from sapwood_bench.kernels.results import Check, in_progress
from sapwood_bench.kernels.timing import first_line


@dataclass
class Outcome:
    """What the parts of a step found."""

    checks: tuple[Check, ...] = ()
    problems: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass
class _Collected:
    checks: list[Check] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def outcome(self, *more_problems: str) -> Outcome:
        return Outcome(tuple(self.checks), (*self.problems, *more_problems), tuple(self.left_out))


@dataclass(frozen=True)
class Parts:
    """What a step of CHECKS has to do."""

    step: str
    names: Sequence[str]
    dry: bool
    save: Callable[[Outcome], None] = lambda outcome: None
    """Takes what was found so far, whenever a part begins or is done."""


def run_apart(parts: Parts, workers: int, deadline: float) -> Outcome:
    """Every part, by `workers` processes; with one, in this process.

    deadline is of `time.monotonic()`: what has not begun by then is left out. An error of a part is a problem; a
    process that dies is one of every part that it still had to do.
    """
    found = _Collected()
    if workers <= 1:
        for name in parts.names:
            if time.monotonic() > deadline:
                found.left_out.append(f"{name}: out of time")
            else:
                parts.save(found.outcome(in_progress(name)))
                _take(found, name, _attempt(parts.step, name, parts.dry))
    else:
        _in_processes(found, parts, workers, deadline)
    return found.outcome()


def _in_processes(found: _Collected, parts: Parts, workers: int, deadline: float) -> None:
    context = multiprocessing.get_context("spawn")  # CUDA can't be used in a fork
    pool = ProcessPoolExecutor(max_workers=workers, mp_context=context)
    futures: dict[Future[list[Check] | str], str] = {
        pool.submit(_attempt, parts.step, name, parts.dry): name for name in parts.names
    }
    waiting = set(futures)
    while waiting:
        parts.save(found.outcome(in_progress(*(futures[future] for future in waiting))))
        done, waiting = wait(waiting, timeout=max(deadline - time.monotonic(), 0.0), return_when=FIRST_COMPLETED)
        for future in done:
            _collect(found, futures[future], future)
        if not done:
            break
    for future in waiting:
        if future.cancel():
            found.left_out.append(f"{futures[future]}: out of time")
        else:
            found.problems.append(f"{futures[future]}: not done in time")
    pool.shutdown(wait=not waiting, cancel_futures=True)


def _collect(found: _Collected, name: str, future: Future[list[Check] | str]) -> None:
    """Whatever ended a part: what the others found must not be lost for it."""
    error = future.exception()
    if error is None:
        _take(found, name, future.result())
    elif isinstance(error, BrokenProcessPool):
        found.problems.append(f"{name}: the process that was to check it died")
    else:
        found.problems.append(f"{name}: {first_line(error)}")


def _take(found: _Collected, name: str, result: list[Check] | str) -> None:
    if isinstance(result, str):
        found.problems.append(f"{name}: {result}")
    else:
        found.checks += result


def _attempt(step: str, name: str, dry: bool) -> list[Check] | str:
    """The part's checks, or the error that ended it."""
    try:
        return CHECKS[step].check(name, measured_device(dry))
    except MEASURE_ERRORS as error:
        return first_line(error)
