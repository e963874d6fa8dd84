"""The engine's end of the socket, against a plain socket in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq

from sapwood_server.engine.channel import EngineChannel
from sapwood_server.values.events import FinalEvent, FinishReason, TokenEvent, Usage
from sapwood_server.values.messages import (
    Cancel,
    EngineStats,
    FromEngine,
    Loading,
    Shutdown,
    StepOutput,
    StepSeconds,
    Submit,
)
from sapwood_server.values.plan import TokenLogprob
from support.engine_requests import make_request


@pytest.fixture(name="peer")
def peer_fixture() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    yield socket
    socket.close(linger=0)
    context.term()


@pytest.fixture(name="endpoint")
def endpoint_fixture(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def test_messages_arrive_as_they_were_sent(peer: zmq.Socket[bytes], endpoint: str) -> None:
    peer.bind(endpoint)
    channel = EngineChannel(endpoint)
    messages = [Submit(make_request("a", (0, 299), max_tokens=7)), Cancel("a"), Shutdown()]
    for message in messages:
        peer.send(msgspec.msgpack.encode(message))
    assert [channel.receive(60.0) for _ in messages] == messages
    assert channel.receive(0.0) is None

    logprob = TokenLogprob(65, -0.5, ((65, -0.5), (66, -1.5)))
    token = TokenEvent(
        request_id="a", choice=1, token_ids=(65,), data=b"\xc3", logprobs=(logprob,), finish_reason=FinishReason.STOP
    )
    final = FinalEvent(request_id="a", usage=Usage(prompt_tokens=2), error="a reason")
    sent: list[FromEngine] = [
        Loading("weights", 0.5),
        StepOutput(
            events=(token, final), stats=EngineStats(steps=3), step_seconds=StepSeconds(schedule=1, forward=2, sample=3)
        ),
    ]
    for output in sent:
        channel.send(output)
    channel.close()
    decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
    assert [decoder.decode(peer.recv()) for _ in sent] == sent


def test_a_peer_that_reads_late_neither_blocks_nor_loses(peer: zmq.Socket[bytes], endpoint: str) -> None:
    peer.set_hwm(100)  # so that what it does not read stays with the engine
    peer.bind(endpoint)
    channel = EngineChannel(endpoint)
    event = TokenEvent(request_id="a", choice=0, token_ids=tuple(range(1000)))
    output = StepOutput(events=(event,), stats=EngineStats())
    count = 4_000  # 12 MB: far over every default high-water mark and socket buffer
    for _ in range(count):
        channel.send(output)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: [peer.recv() for _ in range(count)])
        channel.close()
        assert received.result() == [msgspec.msgpack.encode(output)] * count


def test_close_without_a_peer_ends(endpoint: str) -> None:
    channel = EngineChannel(endpoint)
    channel.send(Loading("weights", 0.5))
    channel.close()


def test_bytes_that_are_no_message_are_an_error(peer: zmq.Socket[bytes], endpoint: str) -> None:
    peer.bind(endpoint)
    channel = EngineChannel(endpoint)
    peer.send(msgspec.msgpack.encode({"type": "submitt"}))
    with pytest.raises(msgspec.ValidationError, match="submitt"):
        channel.receive(60.0)
    channel.close()
