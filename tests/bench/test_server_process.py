"""Processes that are servers for as long as a block runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from sapwood_bench.server_process import ServerFailed, free_port, server_process

READY = re.compile(r"ready at (http://\S+)")
SERVE = """
import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(f"ready at http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def test_a_server_answers_inside_the_block_and_is_gone_after_it() -> None:
    with server_process(python(SERVE), READY, timeout_seconds=60) as running:
        with urllib.request.urlopen(running.base_url) as answer:
            assert answer.status == 200
        assert running.start_seconds > 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(running.base_url)


def test_a_server_that_ends_early_fails_with_its_log() -> None:
    command = python("import sys; sys.exit('no such model: x')")
    failure = pytest.raises(ServerFailed, match=r"ended with code 1:\nno such model: x")
    with failure, server_process(command, READY, timeout_seconds=60):
        pytest.fail("the block ran without a server")


def test_a_server_that_says_nothing_is_stopped_at_the_timeout() -> None:
    failure = pytest.raises(ServerFailed, match="was not ready in time")
    with failure, server_process(python("import time; time.sleep(600)"), READY, timeout_seconds=0.3):
        pytest.fail("the block ran without a server")


def test_a_free_port_can_be_taken() -> None:
    assert 1024 <= free_port() <= 65535


def test_a_bench_that_is_told_to_end_takes_its_server_along() -> None:
    """The scripted server's address appears when both run; after SIGTERM nobody answers there."""
    source = f"""
import re, typer
from sapwood_bench import commands, server_process

def wait_for_ever():
    with server_process.server_process({python(SERVE)!r}, re.compile({READY.pattern!r}), 60) as running:
        print(running.base_url, flush=True)
        while True:
            time.sleep(1)

import time
app = typer.Typer()
app.callback()(lambda: None)
commands.register(app)
bench = app.registered_groups[0].typer_instance
bench.command("wait")(wait_for_ever)
app(["bench", "wait"])
"""
    with subprocess.Popen(python(source), stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        base_url = bench.stdout.readline().strip()
        assert base_url.startswith("http://127.0.0.1:")
        bench.terminate()
        assert bench.wait() == 128 + signal.SIGTERM
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(base_url)
