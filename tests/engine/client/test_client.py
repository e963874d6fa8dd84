"""The engine's client against a scripted engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.client import EngineClient
from sapwood_server.errors import UnavailableError
from sapwood_server.values.events import Event, FinalEvent, TokenEvent
from sapwood_server.values.messages import StepOutput
from support import scripted_engine
from support.engine_requests import DEADLINE_SECONDS, answer_of, ask, make_request, scripted_client
from support.scripted_engine import completion

ENDLESS = 150_000
"""What a request asks for that is to be cancelled."""


def with_client(scenario: Callable[[EngineClient], Awaitable[None]], max_num_seqs: int = 64) -> None:
    """Run the scenario with a fresh scripted engine, within the deadline."""

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS), scripted_client(max_num_seqs=max_num_seqs) as client:
            await scenario(client)

    asyncio.run(run())


async def idle(client: EngineClient) -> None:
    """Wait until the engine has ended everything; an endless request by a cancel, and without keeping a page."""
    while client.num_open or client.stats.requests_running or client.stats.requests_waiting:
        await asyncio.sleep(0.01)
    assert client.stats.pages_active == 0
    assert client.stats.generation_tokens < ENDLESS


def test_a_request_is_answered() -> None:
    async def scenario(client: EngineClient) -> None:
        assert client.ready
        assert client.failure is None
        assert client.info.vocab_size == scripted_engine.VOCAB_SIZE
        answer = await ask(client, make_request("a", (1, 2, 3), max_tokens=20))
        assert answer.token_ids == completion((1, 2, 3), 20)
        assert answer.data == bytes(answer.token_ids)
        assert answer.final.error is None
        assert answer.final.usage.completion_tokens == 20
        await idle(client)

    with_client(scenario)


def test_a_thousand_streams_at_once() -> None:
    async def scenario(client: EngineClient) -> None:
        prompts = [(number % 250, number // 250, 7) for number in range(1000)]
        requests = [make_request(str(number), prompt, 1 + number % 9) for number, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(ask(client, request) for request in requests))
        for number, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
            assert answer.token_ids == completion(prompt, 1 + number % 9)
        await idle(client)

    with_client(scenario)


def test_a_prompt_of_a_hundred_thousand_tokens() -> None:
    async def scenario(client: EngineClient) -> None:
        prompt = tuple(number * number % 251 for number in range(100_000))
        first = await ask(client, make_request("a", prompt, max_tokens=3))
        assert first.token_ids == completion(prompt, 3)
        assert first.final.usage.prompt_tokens == 100_000
        await idle(client)

    with_client(scenario)


def test_cancel_ends_the_stream_with_its_final_event() -> None:
    async def scenario(client: EngineClient) -> None:
        events: list[Event] = []
        async for event in client.stream(make_request("a", (1, 2), max_tokens=ENDLESS)):
            events.append(event)
            if len(events) == 5:
                await client.cancel("a")
        answer = answer_of(events)
        assert answer.final.cancelled
        assert answer.token_ids == completion((1, 2), len(answer.token_ids))
        await client.cancel("a")
        await client.cancel("never seen")
        await idle(client)

    with_client(scenario)


def test_a_consumer_that_stops_early_cancels_its_request() -> None:
    async def scenario(client: EngineClient) -> None:
        async with contextlib.aclosing(client.stream(make_request("a", max_tokens=ENDLESS))) as events:
            assert isinstance(await anext(events), TokenEvent)
        with pytest.raises(ValueError, match="request_id 'a' is taken"):
            client.stream(make_request("a"))
        assert client.num_open == 1, "the engine has not heard of it yet"
        await idle(client)
        assert (await ask(client, make_request("a", (4,), max_tokens=2))).token_ids == completion((4,), 2)

    with_client(scenario)


def test_a_consumer_that_drops_the_stream_cancels_its_request() -> None:
    async def scenario(client: EngineClient) -> None:
        async for event in client.stream(make_request("a", max_tokens=ENDLESS)):
            assert isinstance(event, TokenEvent)
            break
        await idle(client)

    with_client(scenario)


def test_a_consumer_that_is_cancelled_cancels_its_request() -> None:
    async def scenario(client: EngineClient) -> None:
        task = asyncio.create_task(ask(client, make_request("a", max_tokens=ENDLESS)))
        while client.stats.generation_tokens == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(client)

    with_client(scenario)


def test_a_stream_that_is_never_read_sends_nothing() -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.stream(make_request("a"))
        assert client.num_open == 0
        await stream.aclose()
        await ask(client, make_request("a"))

    with_client(scenario)


def test_of_two_streams_with_one_id_the_second_is_refused() -> None:
    async def scenario(client: EngineClient) -> None:
        early, late = client.stream(make_request("a", max_tokens=ENDLESS)), client.stream(make_request("a"))
        await anext(early)
        with pytest.raises(ValueError, match="request_id 'a' is taken"):
            await anext(late)
        assert isinstance(await anext(early), TokenEvent), "the first goes on"
        await early.aclose()

    with_client(scenario)


def test_close_ends_open_streams_and_refuses_new_ones() -> None:
    async def scenario(client: EngineClient) -> None:
        requests = [make_request(str(number), (number,), max_tokens=ENDLESS) for number in range(5)]
        tasks = [asyncio.create_task(ask(client, request)) for request in requests]
        while client.stats.requests_running < 3 or client.stats.generation_tokens == 0:
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            client.stream(make_request("late"))
        await closing
        finals = [answer.final for answer in await asyncio.gather(*tasks)]
        assert all(final.cancelled and final.error is None for final in finals)
        with pytest.raises(UnavailableError):
            client.stream(make_request("too late"))

    with_client(scenario, max_num_seqs=3)


def test_every_step_output_is_seen_before_its_events() -> None:
    outputs: list[StepOutput] = []

    async def run() -> None:
        client = await EngineClient.start(ServerConfig(), command=scripted_engine.COMMAND, on_step=outputs.append)
        async for event in client.stream(make_request("a", max_tokens=6)):
            assert event in outputs[-1].events
            assert client.stats == outputs[-1].stats
        await client.close()

    asyncio.run(run())
    assert sum(output.step_seconds is not None for output in outputs) == 6
    assert isinstance(next(e for o in reversed(outputs) for e in reversed(o.events)), FinalEvent)


def test_the_client_imports_neither_torch_nor_the_engine() -> None:
    program = (
        "import sys; import sapwood_server.engine.client.client;"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'sapwood_kernels')"
        " or m.startswith(('sapwood_server.model', 'sapwood_server.cache', 'sapwood_server.engine.scheduler'))])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
