"""What the kernels are to reach on an H200, judged from the rows of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    """Every target, also those whose case did not run."""
    ceilings = next((step.ceilings for step in steps if step.ceilings is not None), None)
    shared = all_rows(steps, "shared")
    gains = [gain for row in shared if (gain := row.times_faster(UNGROUPED)) is not None]
    prefill = _named(all_rows(steps, "prefill"), PREFILL_CASE)
    gained = _named(shared, SHARED_CASE)
    return [
        *_decode_targets(all_rows(steps, "decode"), ceilings),
        Target(
            name=f"{PREFILL_CASE}: share of matmul",
            value=None if prefill is None or ceilings is None else prefill.tf_s() / ceilings.mm_tf_s,
            at_least=PREFILL_OF_MM,
        ),
        Target(
            name=f"{PREFILL_CASE}: speed over the best SDPA backend's",
            value=None if prefill is None else prefill.times_faster(SDPA),
            at_least=PREFILL_OF_SDPA,
        ),
        Target(
            name=f"{SHARED_CASE}: speed over ungrouped",
            value=None if gained is None else gained.times_faster(UNGROUPED),
            at_least=SHARED_GAIN,
        ),
        Target(name="worst shared case: speed over ungrouped", value=min(gains, default=None), at_least=SHARED_LEAST),
        Target(
            name=f"{STEP_CASE}: floor of weights and keys over time",
            value=_floor_share(_named(all_rows(steps, "model"), STEP_CASE), ceilings),
            at_least=STEP_OF_FLOOR,
        ),
    ]


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
