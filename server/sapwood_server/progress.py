"""How far a start has come, for a person who waits for it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal; elsewhere a log line for each stage."""
    if not sys.stderr.isatty():
        yield _stage_logger()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("starting", total=1.0)
        yield lambda stage, fraction: progress.update(bar, description=stage, completed=fraction)


def _stage_logger() -> Callable[[str, float], None]:
    seen: set[str] = set()

    def log(stage: str, _fraction: float) -> None:
        if stage not in seen:
            seen.add(stage)
            _log.info("loading: %s", stage)

    return log
