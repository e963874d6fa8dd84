"""The engine process's death, as its client sees it: at the start, in the middle, and too often."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.client import EngineClient
from sapwood_server.engine.client.supervisor import SupervisionPolicy
from sapwood_server.errors import StartupError, UnavailableError
from support import scripted_engine
from support.engine_requests import DEADLINE_SECONDS, QUICK_RESTARTS, Answer, ask, make_request, scripted_client
from support.scripted_engine import HANG_ID, KILL_ID, RAISE_ID, STARTS_ONCE, completion


@pytest.fixture(name="sockets", autouse=True)
def sockets_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh temporary directory, so that a test can see what was left behind; pytest's own is too long a name."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def with_client(
    scenario: Callable[[EngineClient], Awaitable[None]], policy: SupervisionPolicy = QUICK_RESTARTS
) -> None:
    """Run the scenario with a fresh scripted engine, within the deadline."""

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS), scripted_client(policy=policy) as client:
            await scenario(client)

    asyncio.run(run())


def start_fails_with(reason: str, model: str = "scripted", command: Sequence[str] = scripted_engine.COMMAND) -> None:
    async def run() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            with pytest.raises(StartupError) as failure:
                await EngineClient.start(ServerConfig(model=model), command=tuple(command))
        assert str(failure.value) == reason

    asyncio.run(run())


async def until_ready(client: EngineClient) -> None:
    while not client.ready:
        assert client.failure is None
        await asyncio.sleep(0.01)


async def running(client: EngineClient, count: int) -> list[asyncio.Task[Answer]]:
    """Requests that all have got tokens and would go on for long."""
    requests = [make_request(f"r{number}", (number, 1), max_tokens=150_000) for number in range(count)]
    tasks = [asyncio.create_task(ask(client, request)) for request in requests]
    while client.stats.requests_running < count or client.stats.generation_tokens < 3 * count:
        await asyncio.sleep(0.01)
    return tasks


def test_a_start_that_fails_gives_the_engines_own_line(sockets: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start_fails_with("/models/refuses/config.json: no such file", scripted_engine.REFUSES)
    assert list(sockets.iterdir()) == []
    assert "Traceback" not in capfd.readouterr().err


def test_a_start_that_crashes_shows_its_traceback_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    start_fails_with("LookupError: nobody foresaw this", scripted_engine.CRASHES)
    assert "LookupError: nobody foresaw this" in capfd.readouterr().err


def test_a_start_that_is_killed_names_the_signal() -> None:
    start_fails_with("the engine process died while it was starting (signal 9 (SIGKILL))", scripted_engine.DIES)


def test_a_command_that_is_no_engine_names_its_exit_code(sockets: Path) -> None:
    start_fails_with("the engine process died while it was starting (exit code 1)", command=("false",))
    start_fails_with("the engine process died while it was starting (exit code 0)", command=("true",))
    assert list(sockets.iterdir()) == []


def test_progress_is_passed_on() -> None:
    progress: list[tuple[str, float]] = []

    async def run() -> None:
        def note(stage: str, fraction: float) -> None:
            progress.append((stage, fraction))

        client = await EngineClient.start(ServerConfig(), command=scripted_engine.COMMAND, on_progress=note)
        await client.close()

    asyncio.run(run())
    assert progress == [("weights", 0.0), ("weights", 1.0)]


def test_a_killed_engine_ends_every_stream_once_and_serves_again(sockets: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        tasks = await running(client, 20)
        killed = client.engine_pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        for number, answer in enumerate(await asyncio.gather(*tasks)):
            assert answer.final.error == "the engine process died (signal 9 (SIGKILL))"
            assert answer.token_ids == completion((number, 1), len(answer.token_ids))
            assert answer.final.usage.completion_tokens == len(answer.token_ids) > 0
        assert not client.ready
        with pytest.raises(UnavailableError, match="try again"):
            client.stream(make_request("too early"))
        await until_ready(client)
        assert client.engine_pid != killed
        assert (await ask(client, make_request("r0", (9,), max_tokens=3))).token_ids == completion((9,), 3)

    with_client(scenario)
    assert list(sockets.iterdir()) == []


def test_an_engine_that_is_told_to_end_cancels_its_requests_and_is_started_again() -> None:
    """SIGTERM from elsewhere is nobody's fault: no error that would keep clients from trying again."""

    async def scenario(client: EngineClient) -> None:
        tasks = await running(client, 3)
        ended = client.engine_pid
        assert ended is not None
        os.kill(ended, signal.SIGTERM)
        for answer in await asyncio.gather(*tasks):
            assert (answer.final.cancelled, answer.final.error) == (True, None)
        while client.engine_pid == ended:
            await asyncio.sleep(0.01)
        await until_ready(client)
        assert (await ask(client, make_request("r0", (9,), max_tokens=3))).token_ids == completion((9,), 3)

    with_client(scenario)


def test_an_abandoned_id_is_free_again_after_a_restart() -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.stream(make_request("a", (1, 2), max_tokens=150_000))
        await anext(stream)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGSTOP)  # the cancel can't be answered
        await stream.aclose()
        assert client.num_open == 1
        os.kill(client.engine_pid, signal.SIGKILL)
        while client.ready:
            await asyncio.sleep(0.01)
        await until_ready(client)
        assert client.num_open == 0
        await ask(client, make_request("a"))

    with_client(scenario)


def test_a_fatal_error_is_told_to_whom_it_hits() -> None:
    async def scenario(client: EngineClient) -> None:
        for number in range(4):
            answer = await ask(client, make_request(str(number), (RAISE_ID,)))
            assert answer.final.error == (
                "the engine failed while it ran this request: ValueError: a token that can't be computed"
            )
        last = await ask(client, make_request("last", (RAISE_ID,)))
        assert last.final.error == (
            "the engine process died (exit code 1): EngineBrokenError: 5 steps in a row failed, "
            "the last with ValueError: a token that can't be computed"
        )
        await until_ready(client)

    with_client(scenario)


def test_an_engine_that_dies_too_often_stays_down() -> None:
    async def scenario(client: EngineClient) -> None:
        for number in range(3):
            await until_ready(client)
            answer = await ask(client, make_request(str(number), (KILL_ID,)))
            assert answer.final.error == "the engine process died (signal 9 (SIGKILL))"
        reason = await client.given_up()
        assert reason == client.failure == "the engine process died (signal 9 (SIGKILL)); restarted 2 times already"
        assert not client.ready
        assert client.engine_pid is None
        with pytest.raises(UnavailableError, match="restarted 2 times already"):
            client.stream(make_request("late"))

    with_client(scenario, SupervisionPolicy(restart_delays=(0.01, 0.01)))


def test_each_restart_waits_its_own_time_and_no_longer_than_the_server_lives(sockets: Path) -> None:
    """The second would wait an hour: the engine is not there soon, and the client's end does not wait for it."""

    async def scenario(client: EngineClient) -> None:
        await ask(client, make_request("first", (KILL_ID,)))
        await until_ready(client)
        await ask(client, make_request("second", (KILL_ID,)))
        for _ in range(30):
            assert (client.ready, client.engine_pid, client.failure) == (False, None, None)
            await asyncio.sleep(0.01)

    with_client(scenario, SupervisionPolicy(restart_delays=(0.01, 3600.0)))
    assert list(sockets.iterdir()) == []


def test_an_engine_that_does_not_start_again_is_given_up(sockets: Path) -> None:
    """Starts that fail count like deaths."""

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS), scripted_client(f"{STARTS_ONCE}{sockets}/started") as client:
            await ask(client, make_request("a", (KILL_ID,)))
            assert await client.given_up() == "it has started once; restarted 3 times already"

    asyncio.run(run())


def test_restarts_out_of_the_window_do_not_count() -> None:
    async def scenario(client: EngineClient) -> None:
        for number in range(3):
            await until_ready(client)
            await ask(client, make_request(str(number), (KILL_ID,)))
        await until_ready(client)

    with_client(scenario, SupervisionPolicy(restart_delays=(0.01,), restart_window_seconds=0.0))


def test_an_engine_that_hangs_is_killed_at_the_end(sockets: Path) -> None:
    async def scenario(client: EngineClient) -> None:
        task = asyncio.create_task(ask(client, make_request("a", (HANG_ID,))))
        while client.num_open == 0:
            await asyncio.sleep(0.01)
        await client.close()
        assert (await task).final.error == "the server was shut down"
        assert client.engine_pid is None

    with_client(scenario, SupervisionPolicy(shutdown_seconds=0.2, terminate_seconds=0.2))
    assert list(sockets.iterdir()) == []


@pytest.mark.parametrize("moment", ["while the process is spawned", "while the model loads"])
def test_a_start_that_is_cancelled_leaves_nothing(sockets: Path, moment: str) -> None:
    async def run() -> None:
        started = asyncio.Event()
        start = EngineClient.start(
            ServerConfig(), command=scripted_engine.COMMAND, on_progress=lambda _stage, _fraction: started.set()
        )
        task = asyncio.create_task(start)
        if moment == "while the model loads":
            await started.wait()
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert list(sockets.iterdir()) == []


def test_a_listener_that_raises_leaves_nobody_waiting() -> None:
    async def run() -> None:
        def refuse(_output: object) -> None:
            raise LookupError("a bug in the metrics")

        client = await EngineClient.start(ServerConfig(), command=scripted_engine.COMMAND, on_step=refuse)
        answer = await ask(client, make_request("a"))
        assert answer.final.error == client.failure == "LookupError: a bug in the metrics"
        assert client.engine_pid is None
        await client.close()

    asyncio.run(run())


def test_ctrl_c_on_the_terminal_does_not_reach_the_engine() -> None:
    async def scenario(client: EngineClient) -> None:
        assert client.engine_pid is not None
        assert os.getsid(client.engine_pid) == client.engine_pid, "it leads a session of its own"

    with_client(scenario)
