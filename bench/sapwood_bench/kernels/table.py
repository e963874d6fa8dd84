"""A run as a short table for people and as one JSON document. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from sapwood_bench.kernels.results import Ceilings, Row, StepResult, Target, all_rows
from sapwood_bench.kernels.targets import judge, share

TABLES = ("decode", "prefill", "shared", "pointwise", "model")
_HEADINGS = ("case", "us", "TB/s", "% copy", "TF/s", "% mm", "error", "best rival", "x faster")
_DRY = "DRY RUN: tiny cases in Triton's interpreter on the CPU. No figure below means anything."


def as_json(steps: Sequence[StepResult]) -> str:
    """Machine, steps with their rows and checks, and targets."""
    document = {
        "bench": "kernels",
        "dry": _is_dry(steps),
        "machine": _machine(steps),
        "steps": [asdict(step) | {"failed": step.failed} for step in steps],
        "targets": [asdict(target) | {"verdict": target.verdict} for target in _targets(steps)],
    }
    return json.dumps(document, indent=1) + "\n"


def as_table(steps: Sequence[StepResult]) -> str:
    """What people read; the verdicts come last, where the end of an output shows them."""
    ceilings = next((step.ceilings for step in steps if step.ceilings is not None), None)
    parts = [_DRY] if _is_dry(steps) else []
    parts.append(", ".join(f"{name} {value}" for name, value in _machine(steps).items()))
    if ceilings is not None:
        parts.append(
            f"ceilings: copy {ceilings.copy_tb_s:.2f} TB/s (read and written), bf16 matmul {ceilings.mm_tf_s:.0f} TF/s"
        )
    for table in TABLES:
        rows = all_rows(steps, table)
        if rows:
            parts.append(f"{table}:\n" + _lined_up([_HEADINGS, *(_cells(row, ceilings) for row in rows)]))
    parts.append("\n".join(_verdicts(steps)))
    return "\n\n".join(parts) + "\n"


def is_good(steps: Sequence[StepResult]) -> bool:
    """No step failed and, unless it was a dry run, every target is met: one that was not measured isn't."""
    return not any(step.failed for step in steps) and all(t.verdict == "met" for t in _targets(steps))


def _targets(steps: Sequence[StepResult]) -> list[Target]:
    return [] if _is_dry(steps) else judge(steps)


def _is_dry(steps: Sequence[StepResult]) -> bool:
    return any(step.dry for step in steps)


def _machine(steps: Sequence[StepResult]) -> dict[str, str | int]:
    return next((step.machine for step in steps if step.machine), {})


def _cells(row: Row, ceilings: Ceilings | None) -> tuple[str, ...]:
    copy = "" if ceilings is None else f"{100 * row.tb_s() / ceilings.copy_tb_s:.1f}"
    product = "" if ceilings is None or not row.flops else f"{100 * row.tf_s() / ceilings.mm_tf_s:.1f}"
    best, times = row.best(), row.times_faster()
    return (
        row.name,
        f"{row.us:.1f}",
        f"{row.tb_s():.3f}",
        copy,
        f"{row.tf_s():.1f}" if row.flops else "",
        product,
        "" if row.error is None else f"{row.error:.1e}",
        "" if best is None else f"{best.name} {best.us:.1f}",
        "" if times is None else share(times),
    )


def _verdicts(steps: Sequence[StepResult]) -> list[str]:
    lines = []
    for step in steps:
        held = sum(not check.problem for check in step.checks)
        checks = f", {held} of {len(step.checks)} checks hold" if step.checks else ""
        lines.append(f"step {step.step}: {'FAILED' if step.failed else 'ok'}, {step.seconds:.0f} s{checks}")
        lines += [f"  FAILED: {problem}" for problem in step.problems]
        lines += [f"  FAILED: {check.name}: {check.problem}" for check in step.checks if check.problem]
        lines += [f"  FAILED: {what}" for what in step.left_out]
        if step.failed and not any((step.problems, step.left_out, step.checks)):
            lines.append("  FAILED: it checked nothing")
    for target in _targets(steps):
        value = "-" if target.value is None else share(target.value)
        lines.append(f"target {target.name}: {value} (>= {target.at_least:g}): {target.verdict}")
    return lines


def _lined_up(lines: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; the first to the left, the others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
