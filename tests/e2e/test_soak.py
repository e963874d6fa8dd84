"""Ten thousand requests, a third of them cancelled at random moments: each ends once, and no page leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sapwood_bench.server_process import sapwood_server
from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.client import EngineClient
from sapwood_server.values.events import FinalEvent, FinishReason, TokenEvent
from sapwood_server.values.messages import EngineStats
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams
from support import checked_engine
from support.scale import scaled
from support.tiny_models import make_tiny_model

NUM_REQUESTS = 10_000
CONCURRENCY = 128
DEADLINE_SECONDS = 800.0
"""For `asyncio.timeout`: ends a test that hangs; nothing is measured by it."""

KV_BYTES = 120 * 16 * 256
"""About 120 pages of the tiny model: 64 running requests want more, so that they evict and preempt one another."""


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("soak") / "tiny")


@dataclass(frozen=True)
class Visit:
    """One request, and when its client loses patience."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    leave_after: int | None
    """Cancel after so many events; None: stay to the end."""
    pause_seconds: float
    """Before leaving, so that it also falls between events and between steps."""


def plan_visits(count: int, seed: int) -> Iterator[Visit]:
    """Short prompts, most of them behind one of twelve shared prefixes. Answers are short, but for waves of long ones
    that the pool can't hold together."""
    draw = random.Random(seed)
    prefixes = [tuple(draw.randrange(3, 250) for _ in range(draw.randrange(0, 97))) for _ in range(12)]
    for number in range(count):
        in_wave = number // CONCURRENCY % 16 == 0
        max_tokens = draw.randrange(100, 161) if in_wave else draw.randrange(1, 17)
        leaves = draw.random() < 1 / 3
        yield Visit(
            number=number,
            prompt=draw.choice(prefixes) + tuple(draw.randrange(3, 250) for _ in range(draw.randrange(1, 17))),
            max_tokens=max_tokens,
            n=draw.choice((1, 1, 1, 1, 2)),
            leave_after=draw.randrange(0, max_tokens + 1) if leaves else None,
            pause_seconds=draw.choice((0.0, draw.random() / 50)),
        )


async def at_once(visits: Iterator[Visit], make: Callable[[Visit], Awaitable[str]]) -> Counter[str]:
    """Make all visits, `CONCURRENCY` at a time; how often each outcome came."""
    outcomes: Counter[str] = Counter()

    async def work() -> None:
        for visit in visits:
            outcomes[await make(visit)] += 1

    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    return outcomes


def check_outcomes(outcomes: Counter[str], count: int) -> None:
    """Every request has an outcome, and both kinds are there in their proportion."""
    assert outcomes.total() == count
    assert set(outcomes) <= {"ended", "cancelled", "left"}
    assert outcomes["ended"] > count / 2
    assert outcomes["cancelled"] + outcomes["left"] > count / 5


# Through the engine's client, with the books checked after every step


async def visit_engine(client: EngineClient, visit: Visit) -> str:
    """Stay to the end, ask for an end by `cancel`, or leave; checks that a final event is the only one, and last."""
    request = Request(
        request_id=str(visit.number),
        prompt_token_ids=visit.prompt,
        sampling=SamplingParams(max_tokens=visit.max_tokens, n=visit.n, seed=visit.number),
    )
    if visit.leave_after is None:
        return await read_to_the_end(client, request, cancel_after=None)
    if visit.number % 2:
        return await read_to_the_end(client, request, cancel_after=visit.leave_after)
    reading = asyncio.ensure_future(read_and_leave(client, request, visit.leave_after))
    if visit.number % 4:
        return await reading
    await asyncio.sleep(visit.pause_seconds)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    return "left"


async def read_to_the_end(client: EngineClient, request: Request, cancel_after: int | None) -> str:
    finals: list[FinalEvent] = []
    finished: Counter[int] = Counter()
    num_events = 0
    async for event in client.stream(request):
        assert not finals, "an event followed the final one"
        if num_events == cancel_after:
            await client.cancel(request.request_id)
        num_events += 1
        match event:
            case FinalEvent():
                finals.append(event)
            case TokenEvent(choice=choice, finish_reason=FinishReason()):
                finished[choice] += 1
    (final,) = finals
    assert final.error is None
    assert finished == Counter(range(request.sampling.n)), "each choice ends exactly once"
    assert final.cancelled is False or cancel_after is not None
    return "cancelled" if final.cancelled else "ended"


async def read_and_leave(client: EngineClient, request: Request, leave_after: int) -> str:
    async with contextlib.aclosing(client.stream(request)) as events:
        for _ in range(leave_after + 1):
            event = await anext(events)
            if isinstance(event, FinalEvent):
                assert event.error is None
                return "ended"
    return "left"


async def idle_stats(client: EngineClient) -> EngineStats:
    """The engine's stats once nothing is left to do."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while client.num_open or client.stats.requests_running or client.stats.requests_waiting:
            await asyncio.sleep(0.01)
    return client.stats


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engine_soak(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = scaled(NUM_REQUESTS, 400)

    async def run() -> None:
        config = ServerConfig(model=str(model), dtype="float32", kv_memory=str(KV_BYTES), max_num_seqs=64)
        client = await EngineClient.start(config, command=checked_engine.COMMAND)
        pid = client.engine_pid
        try:
            outcomes = await at_once(plan_visits(count, 1), lambda visit: visit_engine(client, visit))
            stats = await idle_stats(client)
        finally:
            await client.close()
        check_outcomes(outcomes, count)
        assert client.failure is None
        assert pid is not None
        assert stats.pages_active == 0
        assert stats.pages_free + stats.pages_cached == client.info.num_pages - 1
        assert stats.preemptions > 0, "the pool was meant to be too small"
        assert stats.prompt_tokens_cached > 0

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert caplog.text == "", "no restart, no event after a final one"


# Through the real server


async def visit_server(host: str, port: int, visit: Visit) -> str:
    """Stream a completion over a connection of its own, to the end or until the client hangs up."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(http_request(visit))
        await writer.drain()
        if visit.leave_after == 0:
            await asyncio.sleep(visit.pause_seconds)
            return "left"
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        events: list[str] = []
        async for line in reader:
            if line.startswith(b"data: "):
                events.append(line.removeprefix(b"data: ").decode().strip())
                if len(events) == visit.leave_after:
                    await asyncio.sleep(visit.pause_seconds)
                    return "left"
    finally:
        writer.transport.abort()
    check_stream(events, visit)
    return "ended"


def http_request(visit: Visit) -> bytes:
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": visit.prompt,
            "max_tokens": visit.max_tokens,
            "n": visit.n,
            "seed": visit.number,
            "stream": True,
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def check_stream(events: list[str], visit: Visit) -> None:
    """Each choice finished once, and `[DONE]` is the last word."""
    assert events[-1] == "[DONE]", events[-3:]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    finished = Counter(choice["index"] for choice in choices if choice["finish_reason"] is not None)
    assert finished == Counter(range(visit.n))


async def read_metrics(host: str, port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n")
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    samples = [line.rsplit(" ", 1) for line in answer.splitlines() if line.startswith("sapwood_")]
    return {name: float(value) for name, value in samples}


def pages_by_state(metrics: dict[str, float]) -> dict[str, float]:
    return {state: metrics[f'sapwood_kv_pages{{state="{state}"}}'] for state in ("free", "cached", "active")}


async def idle_metrics(host: str, port: int) -> dict[str, float]:
    """The server's metrics once nothing is left to do."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            metrics = await read_metrics(host, port)
            num_pages = sum(pages_by_state(metrics).values())
            if num_pages and metrics["sapwood_requests_running"] == metrics["sapwood_requests_waiting"] == 0:
                return metrics
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_server_soak(model: Path) -> None:
    count = scaled(NUM_REQUESTS, 400)
    flags = ("--dtype", "float32", "--kv-memory", str(KV_BYTES), "--served-model-name", "tiny")
    with sapwood_server(str(model), flags) as server:
        address = urlsplit(server.base_url)
        host, port = address.hostname or "", address.port or 0
        before = asyncio.run(idle_metrics(host, port))
        outcomes = asyncio.run(at_once(plan_visits(count, 2), lambda visit: visit_server(host, port, visit)))
        after = asyncio.run(idle_metrics(host, port))
    check_outcomes(outcomes, count)
    pages = pages_by_state(after)
    assert pages["active"] == 0
    assert pages["free"] + pages["cached"] == pages_by_state(before)["free"]
    assert after['sapwood_request_success_total{finish_reason="error"}'] == 0
    finished = sum(after[f'sapwood_request_success_total{{finish_reason="{reason}"}}'] for reason in ("stop", "length"))
    assert finished >= outcomes["ended"]
