"""What a person sees of a long load: a bar on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import logging
from sapwood_server.progress import progress_bar
logging.basicConfig(level="INFO", format="%(message)s")
with progress_bar() as on_progress:
    for stage in ("vocabulary", "weights"):
        for step in range(5):
            on_progress(stage, step / 4)
"""
COMMAND = (sys.executable, "-c", PROGRAM)


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end() -> None:
    terminal, its_other_end = os.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(COMMAND, stderr=its_other_end, stdout=subprocess.PIPE, env=environment, check=True)
    os.close(its_other_end)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "weights" in shown
    assert "\u2501" in shown
    assert shown.rstrip().endswith("\x1b[2K"), "the line is erased"
    assert done.stdout == b""


def test_a_log_gets_one_line_for_each_stage() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["loading: vocabulary", "loading: weights"]
    assert done.stdout == ""
