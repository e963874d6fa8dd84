"""`sapwood bench kernels`: the kernels on this machine's GPU, against what it can do and against torch.

The measuring process is one of its own, so that the command line need not import torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from sapwood_bench.kernels.results import MEASURED, read_steps
from sapwood_bench.kernels.table import as_json, as_table, is_good

_MODULE = "sapwood_bench.kernels"
_TUNER = "sapwood_bench.kernels.tune"
_SECONDS_A_STEP = 240


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("kernels")(kernels)


def kernels(
    tune: Annotated[bool, typer.Option("--tune", help="Search for better tiles and write them to the table.")] = False,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="With --tune: update register bounds alone; needs no GPU.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two cases of each table.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The Triton kernels on a GPU: bandwidth, speed and ratio to torch's own attention."""
    if compile_only and not tune:
        raise typer.BadParameter("--compile-only is a way to --tune; accepted: both, or neither")
    if tune:
        if quick or json:
            raise typer.BadParameter("--tune writes the table; accepted with it: --compile-only")
        raise typer.Exit(_run(_TUNER, ["--compile-only"] if compile_only else []))
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        steps = [word for step in MEASURED for word in ("--step", step)]
        arguments = ["--out", folder, *steps, "--seconds", str(_SECONDS_A_STEP), *(["--quick"] if quick else [])]
        code = _run(_MODULE, arguments)
        if code not in (0, 1):  # 1: a step failed, which the report says
            raise typer.Exit(code)
        found = read_steps(Path(folder), MEASURED)
    sys.stdout.write(as_json(found) if json else as_table(found))
    if not is_good(found):
        raise typer.Exit(1)


def _run(module: str, arguments: list[str]) -> int:
    """The exit code of a process of its own, which has our stderr."""
    command = [sys.executable, "-m", module, *arguments]
    code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    return code if code >= 0 else 128 - code
