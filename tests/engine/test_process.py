"""The engine process's start and ends, seen from a parent that speaks to it over a plain socket."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from sapwood_server.config import ServerConfig
from sapwood_server.values.events import Event
from sapwood_server.values.messages import Failed, FromEngine, Loading, Ready, Shutdown, StepOutput, Submit, ToEngine
from support import scripted_engine
from support.engine_requests import answer_of, make_request

DEADLINE_SECONDS = 60


class Child:
    """A scripted engine process, and the socket it talks to."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, DEADLINE_SECONDS * 1_000)
        self._socket.bind(endpoint)
        command = [*scripted_engine.COMMAND, endpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(ServerConfig(model=model)) + b"\n")
        self.process.stdin.flush()

    def send(self, message: ToEngine) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> FromEngine:
        message: FromEngine = msgspec.msgpack.decode(self._socket.recv(), type=FromEngine)
        return message

    def receive_until(self, kind: type[FromEngine]) -> list[FromEngine]:
        """All messages up to the first of this kind."""
        messages = [self.receive()]
        while not isinstance(messages[-1], kind):
            messages.append(self.receive())
        return messages

    def end(self) -> tuple[int, str]:
        """Wait for its end; its exit code and stderr. Stdin stays open meanwhile, as in a living parent."""
        assert self.process.stderr is not None
        code = self.process.wait(DEADLINE_SECONDS)
        return code, self.process.stderr.read().decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self._socket.close(linger=0)
        self._context.term()


@contextlib.contextmanager
def child(folder: Path, model: str = "scripted") -> Iterator[Child]:
    engine = Child(f"ipc://{folder}/s", model)
    try:
        yield engine
    finally:
        engine.close()


def run_a_request(engine: Child) -> None:
    """Returns once it has got some tokens; it would go on for long."""
    engine.send(Submit(make_request("a", (1, 2), max_tokens=100_000)))
    while not any(isinstance(m, StepOutput) and m.events for m in engine.receive_until(StepOutput)):
        pass


def rest_of_events(engine: Child) -> list[Event]:
    """Every event from now to the final one of the one request."""
    events: list[Event] = []
    while engine_output := engine.receive_until(StepOutput)[-1]:
        assert isinstance(engine_output, StepOutput)
        events += engine_output.events
        if engine_output.stats.requests_running == 0:
            return events
    return events


def test_start_reports_progress_then_ready(tmp_path: Path) -> None:
    with child(tmp_path) as engine:
        *loading, ready = engine.receive_until(Ready)
        assert loading == [Loading("weights", 0.0), Loading("weights", 1.0)]
        assert isinstance(ready, Ready)
        assert ready.info.model == "scripted"


def test_shutdown_ends_what_runs_and_exits_with_0(tmp_path: Path) -> None:
    with child(tmp_path) as engine:
        engine.receive_until(Ready)
        run_a_request(engine)
        engine.send(Shutdown())
        answer = answer_of(rest_of_events(engine))
        assert answer.final.cancelled
        assert engine.end() == (0, "")


def test_sigterm_does_what_shutdown_does_and_sigint_nothing(tmp_path: Path) -> None:
    with child(tmp_path) as engine:
        engine.receive_until(Ready)
        run_a_request(engine)
        engine.process.send_signal(signal.SIGINT)
        engine.send(Submit(make_request("b", (3,), max_tokens=1)))
        engine.process.send_signal(signal.SIGTERM)
        answer = answer_of([event for event in rest_of_events(engine) if event.request_id == "a"])
        assert answer.final.cancelled
        assert engine.end() == (0, "")


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with child(tmp_path, scripted_engine.REFUSES) as engine:
        assert engine.receive_until(Failed)[-1] == Failed("/models/refuses/config.json: no such file")
        code, stderr = engine.end()
        assert code == 1
        assert "Traceback" not in stderr


def test_a_start_that_crashes_leaves_its_traceback(tmp_path: Path) -> None:
    with child(tmp_path, scripted_engine.CRASHES) as engine:
        assert engine.receive_until(Failed)[-1] == Failed("LookupError: nobody foresaw this")
        code, stderr = engine.end()
        assert code == 1
        assert "Traceback" in stderr


def test_what_breaks_the_loop_is_a_failure_with_exit_code_1(tmp_path: Path) -> None:
    with child(tmp_path) as engine:
        engine.receive_until(Ready)
        for number in range(5):
            engine.send(Submit(make_request(str(number), (scripted_engine.RAISE_ID,))))
            while number < 4 and not any(
                isinstance(m, StepOutput) and m.events for m in engine.receive_until(StepOutput)
            ):
                pass
        failed = engine.receive_until(Failed)[-1]
        assert failed == Failed(
            "EngineBrokenError: 5 steps in a row failed, the last with ValueError: a token that can't be computed"
        )
        assert engine.end()[0] == 1


@pytest.mark.parametrize("state", ["idle", "in a step that hangs"])
def test_end_of_stdin_ends_it(tmp_path: Path, state: str) -> None:
    with child(tmp_path) as engine:
        engine.receive_until(Ready)
        if state != "idle":
            engine.send(Submit(make_request("a", (scripted_engine.HANG_ID,))))
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        assert engine.end() == (1, "")


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE)
child.stdin.write(sys.argv[1].encode() + b"\\n")
child.stdin.flush()
print(child.pid, flush=True)
time.sleep(3600)
"""


def test_it_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    config = msgspec.json.encode(ServerConfig(model="scripted")).decode()
    command = [sys.executable, "-c", PARENT, config, *scripted_engine.COMMAND, f"ipc://{tmp_path}/s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        watch = os.pidfd_open(engine_pid)
        assert not select.select([watch], [], [], 0)[0], "the engine runs"
        parent.kill()
        assert select.select([watch], [], [], DEADLINE_SECONDS)[0], "the engine has ended"
        os.close(watch)


@pytest.mark.parametrize("arguments", [[], ["one", "two"]])
def test_wrong_usage_is_explained(arguments: list[str]) -> None:
    result = subprocess.run([*scripted_engine.COMMAND, *arguments], stdin=subprocess.DEVNULL, capture_output=True)
    assert result.returncode == 1
    assert b"usage: python -m sapwood_server.engine ENDPOINT" in result.stderr


def test_missing_configuration_is_explained() -> None:
    result = subprocess.run([*scripted_engine.COMMAND, "ipc:///nowhere"], stdin=subprocess.DEVNULL, capture_output=True)
    assert result.returncode == 1
    assert b"configuration as one line of JSON on stdin" in result.stderr
