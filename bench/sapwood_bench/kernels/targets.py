"""What the kernels are to reach on an H200, judged from the rows of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sapwood_bench.kernels.results import Ceilings, Row, StepResult, Target, all_rows

DECODE_OF_COPY = 0.85
DECODE_FROM_BYTES = 256 * 2**20
"""Of keys and values: below it, starting and merging take a share that no bandwidth makes up for."""
PREFILL_OF_MM = 0.50
PREFILL_OF_SDPA = 0.80
PREFILL_CASE = "prefill 1 x 8k"
SHARED_GAIN = 8.0
SHARED_CASE = "shared 4k x 64"
SHARED_LEAST = 0.97
STEP_OF_FLOOR = 0.80
STEP_CASE = "decode step, 1 x 1k, graph"
UNGROUPED = "ungrouped"
SDPA = "sdpa "
"""How the names of torch's own attention on contiguous keys begin, the gather left out."""


def judge(steps: Sequence[StepResult]) -> list[Target]:
    """Every target of the tables among the steps, also those whose case did not run."""
    tables = {step.step for step in steps}
    return [target for table, target in _every_target(steps) if table in tables]


def _every_target(steps: Sequence[StepResult]) -> Iterator[tuple[str, Target]]:
    """With its table."""
    ceilings = next((step.ceilings for step in steps if step.ceilings is not None), None)
    shared = all_rows(steps, "shared")
    gains = [gain for row in shared if (gain := row.times_faster(UNGROUPED)) is not None]
    prefill = _named(all_rows(steps, "prefill"), PREFILL_CASE)
    gained = _named(shared, SHARED_CASE)
    yield from (("decode", target) for target in _decode_targets(all_rows(steps, "decode"), ceilings))
    prefill_of_mm = None if prefill is None or ceilings is None else prefill.tf_s() / ceilings.mm_tf_s
    prefill_of_sdpa = None if prefill is None else prefill.times_faster(SDPA)
    gain = None if gained is None else gained.times_faster(UNGROUPED)
    of_floor = _floor_share(_named(all_rows(steps, "model"), STEP_CASE), ceilings)
    for table, name, value, at_least in (
        ("prefill", f"{PREFILL_CASE}: share of matmul", prefill_of_mm, PREFILL_OF_MM),
        ("prefill", f"{PREFILL_CASE}: speed over the best SDPA backend's", prefill_of_sdpa, PREFILL_OF_SDPA),
        ("shared", f"{SHARED_CASE}: speed over ungrouped", gain, SHARED_GAIN),
        ("shared", "worst shared case: speed over ungrouped", min(gains, default=None), SHARED_LEAST),
        ("model", f"{STEP_CASE}: floor of weights and keys over time", of_floor, STEP_OF_FLOOR),
    ):
        yield table, Target(name=name, value=value, at_least=at_least)


def _decode_targets(rows: Sequence[Row], ceilings: Ceilings | None) -> list[Target]:
    large = [row for row in rows if row.kv_bytes >= DECODE_FROM_BYTES]
    if not large or ceilings is None:
        return [Target(name="decode from 256 MiB of keys: share of copy", value=None, at_least=DECODE_OF_COPY)]
    return [
        Target(name=f"{row.name}: share of copy", value=row.tb_s() / ceilings.copy_tb_s, at_least=DECODE_OF_COPY)
        for row in large
    ]


def _floor_share(row: Row | None, ceilings: Ceilings | None) -> float | None:
    return None if row is None or ceilings is None else row.tb_s() / ceilings.copy_tb_s


def _named(rows: Sequence[Row], name: str) -> Row | None:
    return next((row for row in rows if row.name == name), None)


def share(value: float) -> str:
    """A ratio as people read it: `0.873`, `12.3`."""
    return f"{value:.3f}" if math.fabs(value) < 10 else f"{value:.1f}"
