"""`python -m sapwood_bench.kernels.report --out FOLDER`: one report of what the steps of a run left in a folder.

Standard library only. Exit codes: 0; 1 if a step failed, left nothing, or a target was not met.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sapwood_bench.kernels.results import ORDER, read_steps
from sapwood_bench.kernels.table import as_json, as_table, is_good


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, or JSON; writes either where it is asked to."""
    parser = argparse.ArgumentParser(prog="python -m sapwood_bench.kernels.report", description="Report a run.")
    parser.add_argument("--out", type=Path, required=True, help="Folder that the steps wrote to.")
    parser.add_argument("--step", action="append", choices=ORDER, help="May be given several times; default: all.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--write-json", type=Path, help="Write JSON to this file too.")
    parser.add_argument("--write-table", type=Path, help="Write the table to this file too.")
    options = parser.parse_args(arguments)
    steps = read_steps(options.out, options.step or ORDER)
    for path, text in ((options.write_json, as_json(steps)), (options.write_table, as_table(steps))):
        if path is not None:
            path.write_text(text, encoding="utf-8")
    sys.stdout.write(as_json(steps) if options.json else as_table(steps))
    return 0 if is_good(steps) else 1


if __name__ == "__main__":
    sys.exit(main())
