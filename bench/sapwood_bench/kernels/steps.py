"""The steps of a run, each by itself: what it does, within how long, and what it found.

Cases that a target rests on come first; a step that runs out of time says which ones it left out.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sapwood_bench.kernels import cases
from sapwood_bench.kernels.attention_speed import SHARED, time_case
from sapwood_bench.kernels.ceilings import measure_ceilings
from sapwood_bench.kernels.checks import CHECKS
from sapwood_bench.kernels.device import Device, describe
from sapwood_bench.kernels.errors import MEASURE_ERRORS
from sapwood_bench.kernels.pointwise import LOGIT_ROWS, NUM_ROWS, ON_LOGITS, OPS, time_op
from sapwood_bench.kernels.results import Ceilings, Check, Row, StepResult, in_progress
from sapwood_bench.kernels.timing import ROUNDS, first_line
from sapwood_bench.kernels.workers import Outcome, Parts, run_apart

Task = Callable[[], Iterator[Row | Check]]
Save = Callable[[StepResult], None]
# By name, because they import the server, which needs packages that the other steps do without.
_MODEL_STEP = "sapwood_bench.kernels.model_step"
_MODEL_BITS = "sapwood_bench.kernels.model_bits"


def _forget(result: StepResult) -> None:
    """For whoever waits for the whole of a step."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a step is run."""

    device: Device
    seconds: float
    """After which nothing new is begun."""
    quick: bool = False
    """Two cases of each table."""
    workers: int = 1
    """Processes for what is checked and not timed: most of its time goes into compiling."""
    save: Save = _forget
    """Takes what a step has found so far, whenever that is more; what it is at is among its problems."""


def run_step(step: str, options: RunOptions) -> StepResult:
    """Carries out a step of STEPS. What goes wrong in it is in its result; only an unknown step raises (KeyError)."""
    started = time.monotonic()
    found = StepResult(step=step, machine=describe(options.device), dry=options.device.dry)

    def timed(result: StepResult) -> StepResult:
        return replace(result, seconds=round(time.monotonic() - started, 1))

    def save(result: StepResult) -> None:
        options.save(timed(result))

    return timed(STEPS[step](replace(options, save=save), found, started + options.seconds))


def _versions(options: RunOptions, found: StepResult, deadline: float) -> StepResult:
    return found


def _ceilings(options: RunOptions, found: StepResult, deadline: float) -> StepResult:
    try:
        ceilings: Ceilings | None = measure_ceilings(options.device)
    except MEASURE_ERRORS as error:
        return replace(found, problems=(first_line(error),))
    return replace(found, ceilings=ceilings)


def _checked(options: RunOptions, found: StepResult, deadline: float) -> StepResult:
    kinds = CHECKS[found.step]
    try:
        names = kinds.names(options.device.dry)
    except MEASURE_ERRORS as error:
        return replace(found, problems=(first_line(error),))

    def with_outcome(outcome: Outcome) -> StepResult:
        return replace(found, checks=outcome.checks, problems=outcome.problems, left_out=outcome.left_out)

    parts = Parts(found.step, names, options.device.dry, save=lambda outcome: options.save(with_outcome(outcome)))
    return with_outcome(run_apart(parts, options.workers, deadline))


def _attention(make: Callable[[], tuple[cases.AttentionCase, ...]]) -> Step:
    def step(options: RunOptions, found: StepResult, deadline: float) -> StepResult:
        chosen = cases.quick(make()) if options.quick else make()
        tasks = {case.name: _case_task(case, found.step, options.device) for case in chosen}
        return run_tasks(tasks, found, deadline, options.save)

    return step


def _case_task(case: cases.AttentionCase, table: str, device: Device) -> Task:
    def task() -> Iterator[Row | Check]:
        yield from time_case(case, table, device, rounds=_rounds(device))

    return task


def _rounds(device: Device) -> int:
    return 1 if device.dry else ROUNDS


def _pointwise(options: RunOptions, found: StepResult, deadline: float) -> StepResult:
    def counts(op: str) -> tuple[int, ...]:
        every = LOGIT_ROWS if op in ON_LOGITS else NUM_ROWS
        return every[1:2] if options.quick or options.device.dry else every

    def task_of(op: str, num_rows: int) -> Task:
        def task() -> Iterator[Row | Check]:
            yield from time_op(op, num_rows, options.device, rounds=_rounds(options.device))

        return task

    tasks = {f"{op}, {count} rows": task_of(op, count) for op in OPS for count in counts(op)}
    return run_tasks(tasks, found, deadline, options.save)


def _model(options: RunOptions, found: StepResult, deadline: float) -> StepResult:
    try:
        model_step = importlib.import_module(_MODEL_STEP)
    except ImportError as error:
        return replace(found, problems=(f"SKIPPED, the runner needs a package that is not installed: {error}",))

    def task_of(graphs: bool) -> Task:
        def task() -> Iterator[Row | Check]:
            yield from model_step.measure_model(options.device, graphs)

        return task

    return run_tasks({"with graphs": task_of(True), "without graphs": task_of(False)}, found, deadline, options.save)


def _bits(options: RunOptions, found: StepResult, deadline: float) -> StepResult:
    try:
        model_bits = importlib.import_module(_MODEL_BITS)
    except ImportError as error:
        return replace(found, problems=(f"SKIPPED, the runner needs a package that is not installed: {error}",))

    def task() -> Iterator[Row | Check]:
        yield from model_bits.check_bits(options.device)

    return run_tasks({"the runner's bits": task}, found, deadline, options.save)


def run_tasks(tasks: dict[str, Task], found: StepResult, deadline: float, save: Save = _forget) -> StepResult:
    """Runs the tasks in turn until the deadline. One of MEASURE_ERRORS ends its task, not the step. What was found
    so far is saved before each."""
    rows: list[Row] = []
    checks: list[Check] = []
    problems: list[str] = []
    left_out: list[str] = []

    def so_far(*more: str) -> StepResult:
        lists = {"rows": rows, "checks": checks, "problems": [*problems, *more], "left_out": left_out}
        return replace(found, **{name: tuple(values) for name, values in lists.items()})  # type: ignore[arg-type]

    for name, task in tasks.items():
        if time.monotonic() > deadline:
            left_out.append(f"{name}: out of time")
            continue
        save(so_far(in_progress(name)))
        try:
            for result in task():
                (rows if isinstance(result, Row) else checks).append(result)  # type: ignore[arg-type]
        except MEASURE_ERRORS as error:
            problems.append(f"{name}: {first_line(error)}")
    return so_far()


Step = Callable[[RunOptions, StepResult, float], StepResult]

STEPS: dict[str, Step] = {
    "versions": _versions,
    "ceilings": _ceilings,
    **dict.fromkeys(CHECKS, _checked),
    "bits": _bits,
    "decode": _attention(cases.decode_cases),
    "prefill": _attention(cases.prefill_cases),
    SHARED: _attention(cases.shared_cases),
    "pointwise": _pointwise,
    "model": _model,
}
"""By name: those of `results.ORDER`."""
