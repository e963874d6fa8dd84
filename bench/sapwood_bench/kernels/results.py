"""What a step found, as JSON and back. Standard library only: a report is put together without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ORDER = (
    "versions",
    "ceilings",
    "correct",
    "identity",
    "repeat",
    "ops",
    "bits",
    "decode",
    "prefill",
    "shared",
    "pointwise",
    "model",
)
"""The steps of a run."""
MEASURED = ("ceilings", "decode", "prefill", "shared", "pointwise", "model")
"""Those of `sapwood bench kernels`; the rest are the checks of `bench/gpu_check.sh`."""
CHECKED = ("correct", "identity", "repeat", "ops", "bits")
"""Those that do nothing but check."""


@dataclass(frozen=True)
class Failure:
    """Why something could not be timed."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that must hold."""

    name: str
    problem: str = ""
    """Empty: it holds."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the machine does at best, as measured just before."""

    copy_tb_s: float
    """Of a device-to-device copy of 4 GiB: bytes read and bytes written, 1e12 a second."""
    mm_tf_s: float
    """Of a bf16 matrix product of 8192 x 8192 x 8192, random numbers: 1e12 operations a second."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """The same by somebody else."""

    name: str
    us: float | None = None
    """None: not to be had."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One timed case."""

    table: str
    """decode, prefill, shared, pointwise or model."""
    name: str
    us: float
    num_bytes: int
    flops: int = 0
    kv_bytes: int = 0
    partial_bytes: int = 0
    """What split decode moves besides."""
    error: float | None = None
    """Relative to fp64, in the Euclidean norm; None where it was checked elsewhere."""
    rivals: tuple[Rival, ...] = ()
    note: str = ""

    def best(self, prefix: str = "") -> Rival | None:
        """The fastest rival whose name begins so; None if there is none."""
        had = [rival for rival in self.rivals if rival.us is not None and rival.name.startswith(prefix)]
        return min(had, key=lambda rival: rival.us or math.inf, default=None)

    def times_faster(self, prefix: str = "") -> float | None:
        """The best rival's time over ours."""
        best = self.best(prefix)
        return None if best is None or best.us is None else best.us / self.us

    def tb_s(self) -> float:
        """1e12 bytes a second, of those that must move."""
        return self.num_bytes / self.us / 1e6

    def tf_s(self) -> float:
        """1e12 operations a second."""
        return self.flops / self.us / 1e6


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure and what it should be."""

    name: str
    value: float | None
    """None: its case did not run."""
    at_least: float

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if self.value >= self.at_least else "MISSED"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """All that one step found."""

    step: str
    seconds: float = 0.0
    machine: dict[str, str | int] = field(default_factory=dict)
    dry: bool = False
    problems: tuple[str, ...] = ()
    """Why it failed; empty if it did not."""
    left_out: tuple[str, ...] = ()
    """What it did not do, and why."""
    ceilings: Ceilings | None = None
    checks: tuple[Check, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def failed(self) -> bool:
        """A check that does not hold or was never made is a failure."""
        unchecked = self.step in CHECKED and not self.checks
        return bool(self.problems or self.left_out) or unchecked or any(check.problem for check in self.checks)


def write_step(result: StepResult, folder: Path) -> None:
    """As `STEP.json` in the folder, whole or not at all: the process may be ended at any time."""
    text = json.dumps(asdict(result), indent=1)
    unfinished = folder / f"{result.step}.json.new"
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(folder / f"{result.step}.json")


def in_progress(*names: str) -> str:
    """The problem of a result that is saved while these are at work; one that says so at the end was cut short."""
    return f"in progress: {'; '.join(names)}"


def read_steps(folder: Path, order: Sequence[str]) -> list[StepResult]:
    """What the steps left in the folder; a step that left nothing has that as its problem.

    Raises ValueError, naming the file, for one that holds something else.
    """
    return [_read_step(folder / f"{step}.json", step) for step in order]


def read_ceilings(folder: Path) -> Ceilings | None:
    """What the step `ceilings` measured; None if it hasn't."""
    return read_steps(folder, ["ceilings"])[0].ceilings


def _read_step(path: Path, step: str) -> StepResult:
    if not path.exists():
        return StepResult(step=step, problems=("it left no result: not run, out of time, or dead",))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        ceilings = values["ceilings"]
        return StepResult(
            **values
            | {
                "ceilings": None if ceilings is None else Ceilings(**ceilings),
                "problems": tuple(values["problems"]),
                "left_out": tuple(values["left_out"]),
                "checks": tuple(Check(**check) for check in values["checks"]),
                "rows": tuple(_read_row(row) for row in values["rows"]),
            }
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no step's result: {error}") from error


def _read_row(values: dict[str, object]) -> Row:
    rivals = values["rivals"]
    if not isinstance(rivals, list):
        raise ValueError(f"rivals is {rivals!r}; accepted: a list")
    return Row(**values | {"rivals": tuple(Rival(**rival) for rival in rivals)})  # type: ignore[arg-type]


def as_rivals(times: Mapping[str, float | Failure]) -> tuple[Rival, ...]:
    """What `time_contenders` found of others."""
    return tuple(
        Rival(name=name, note=time.reason) if isinstance(time, Failure) else Rival(name=name, us=time)
        for name, time in times.items()
    )


def all_rows(steps: Iterable[StepResult], table: str) -> list[Row]:
    """The rows of one table, in the order they were measured."""
    return [row for step in steps for row in step.rows if row.table == table]
