"""`python -m sapwood_bench.kernels --out FOLDER`: carries out steps of a run, and leaves what each found in the folder.

`sapwood_bench.kernels.report` makes one report of it. Exit codes: 0; 1 if a step failed; 2 if nothing can be measured
here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sapwood_bench.kernels.device import NoDeviceError, measured_device
from sapwood_bench.kernels.results import ORDER, write_step
from sapwood_bench.kernels.steps import RunOptions, run_step

_DEFAULT_SECONDS = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs steps one after the other; each leaves in the folder what it has found, as soon as it has found it."""
    options = _parser().parse_args(arguments)
    try:
        device = measured_device(options.dry_run)
    except NoDeviceError as error:
        print(f"sapwood bench kernels: {error}; nothing was measured", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for step in options.step or ORDER:
        result = run_step(
            step,
            RunOptions(
                device=device,
                seconds=options.seconds,
                quick=options.quick,
                workers=options.workers,
                save=lambda found: write_step(found, options.out),
            ),
        )
        write_step(result, options.out)
        print(f"{step}: {'FAILED' if result.failed else 'ok'} after {result.seconds:.1f} s", file=sys.stderr)
        failed |= result.failed
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sapwood_bench.kernels", description="Measure the kernels.")
    parser.add_argument("--out", type=Path, required=True, help="Folder for one JSON file a step.")
    parser.add_argument("--step", action="append", choices=ORDER, help="May be given several times; default: all.")
    parser.add_argument("--seconds", type=float, default=_DEFAULT_SECONDS, help="A step begins nothing new after it.")
    parser.add_argument("--workers", type=int, default=1, help="Processes for steps that only check.")
    parser.add_argument("--quick", action="store_true", help="Two cases of each table.")
    parser.add_argument("--dry-run", action="store_true", help="Tiny cases in Triton's interpreter on the CPU.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
