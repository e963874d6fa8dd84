"""When heartbeats are sent, on a clock of the test's own. (Over HTTP: test_streaming.py.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest
from starlette.types import Message

from sapwood_server.api.sse import DONE, EventStream, event
from sapwood_server.errors import ApiError
from support.virtual_time import run_in_virtual_time

HEARTBEAT_SECONDS = 10.0


def body_of(pauses: Sequence[float]) -> list[tuple[float, bytes]]:
    """The pieces of a stream with the seconds at which they were sent: chunk `i` comes `pauses[i]` after the one before
    it, numbered from 0."""
    sent: list[tuple[float, bytes]] = []

    async def chunks() -> AsyncGenerator[bytes, None]:
        for number, pause in enumerate(pauses):
            await asyncio.sleep(pause)
            yield event(b"%d" % number)
        yield DONE

    async def never() -> Message:
        message: Message = await asyncio.get_running_loop().create_future()
        return message

    async def send(message: Message) -> None:
        if message.get("body"):
            sent.append((asyncio.get_running_loop().time(), message["body"]))

    def error_event(error: ApiError) -> bytes:
        return event(error.message.encode())

    async def serve() -> None:
        stream = EventStream(chunks(), {}, heartbeat_seconds=HEARTBEAT_SECONDS, error_event=error_event)
        await stream({"type": "http"}, never, send)

    run_in_virtual_time(serve())
    return sent


def heartbeats(pauses: Sequence[float]) -> list[float]:
    """When heartbeats were sent; checks that all chunks came, in order."""
    sent = body_of(pauses)
    data = [piece for _, piece in sent if not piece.startswith(b":")]
    assert data == [*(event(b"%d" % number) for number in range(len(pauses))), DONE]
    return [at for at, piece in sent if piece == b": keep-alive\n\n"]


@pytest.mark.parametrize("pause", [0.0, 1.0, 9.9])
def test_no_heartbeat_in_a_stream_that_flows(pause: float) -> None:
    assert heartbeats([pause] * 50) == []


def test_a_heartbeat_whenever_nothing_was_sent_for_so_long() -> None:
    assert heartbeats([9.0, 35.0, 9.0, 12.0]) == [19.0, 29.0, 39.0, 63.0]


def test_heartbeats_begin_before_the_first_chunk() -> None:
    assert heartbeats([25.0]) == [10.0, 20.0]
