"""A server in a process of its own, on a free loopback port, for as long as a bench needs it."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sapwood_server.errors import SapwoodError

SERVE_COMMAND = (sys.executable, "-m", "sapwood_server", "serve")
STOP_SECONDS = 20.0

_READY = re.compile(r"ready at (http://[\w.]+:\d+)")
_POLL_SECONDS = 0.01


class ServerFailed(SapwoodError):
    """A server ended, or said nothing, before it was ready. The message has the end of its log."""


@dataclass(frozen=True)
class RunningServer:
    """A server that answers requests."""

    base_url: str
    start_seconds: float
    """From starting the process to its saying that it is ready."""


@contextlib.contextmanager
def sapwood_server(
    model: str, flags: Sequence[str] = (), *, environment: Sequence[str] = (), timeout_seconds: float = 120.0
) -> Iterator[RunningServer]:
    """Our own server with `flags`, on a port that the system picks; `environment` adds variables, as `NAME=value`."""
    command = [*SERVE_COMMAND, "--model", model, "--host", "127.0.0.1", "--port", "0", *flags]
    with server_process(["env", *environment, *command], _READY, timeout_seconds) as running:
        yield running


@contextlib.contextmanager
def server_process(command: Sequence[str], ready: re.Pattern[str], timeout_seconds: float) -> Iterator[RunningServer]:
    """Runs `command` until the block ends. It is ready when its output matches `ready`, whose group 1 is the base URL.

    Raises ServerFailed if it ends first or takes longer than the timeout.
    """
    with tempfile.TemporaryDirectory(prefix="sapwood-bench-") as folder:
        log_path = Path(folder) / "server.log"
        started = time.perf_counter()
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            base_url = _wait_until_ready(process, log_path, ready, started + timeout_seconds)
            yield RunningServer(base_url=base_url, start_seconds=time.perf_counter() - started)
        finally:
            _stop(process)


def free_port() -> int:
    """A loopback port that is free now, for a server that can't pick one itself."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _wait_until_ready(process: subprocess.Popen[bytes], log_path: Path, ready: re.Pattern[str], deadline: float) -> str:
    while True:
        ended = process.poll() is not None
        log = log_path.read_text(encoding="utf-8", errors="replace")
        match = ready.search(log)
        if match is not None:
            return match[1]
        if ended or time.perf_counter() > deadline:
            reason = f"ended with code {process.returncode}" if ended else "was not ready in time"
            raise ServerFailed(f"{process.args!r} {reason}:\n{log[-2000:]}")
        time.sleep(_POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
