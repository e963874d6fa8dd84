"""The table of open streams: each gets its own events, and exactly one final one."""

from __future__ import annotations

import logging

import pytest

from sapwood_server.engine.client.streams import OpenStream, StreamTable
from sapwood_server.values.events import Event, FinalEvent, TokenEvent, Usage
from support.engine_requests import make_request


def token(request_id: str, *token_ids: int) -> TokenEvent:
    return TokenEvent(request_id=request_id, choice=0, token_ids=token_ids)


def final(request_id: str) -> FinalEvent:
    return FinalEvent(request_id=request_id, usage=Usage(prompt_tokens=3))


def queued(stream: OpenStream) -> list[Event]:
    return [stream.events.get_nowait() for _ in range(stream.events.qsize())]


def test_events_go_to_their_own_stream() -> None:
    table = StreamTable()
    a, b = table.open(make_request("a")), table.open(make_request("b"))
    for event in (token("a", 1), token("b", 2), final("b"), token("a", 3), final("a")):
        table.deliver(event)
    assert queued(a) == [token("a", 1), token("a", 3), final("a")]
    assert queued(b) == [token("b", 2), final("b")]
    assert len(table) == 0


def test_an_id_is_taken_until_its_final_event() -> None:
    table = StreamTable()
    table.open(make_request("a"))
    with pytest.raises(ValueError, match="request_id 'a' is taken by a request that has not ended"):
        table.open(make_request("a"))
    table.deliver(final("a"))
    table.open(make_request("a"))


def test_an_abandoned_stream_keeps_its_id_but_no_events() -> None:
    table = StreamTable()
    stream = table.open(make_request("a"))
    table.deliver(token("a", 1))
    queued(stream)
    assert table.abandon(stream), "the engine has yet to end it"
    table.deliver(token("a", 2))
    with pytest.raises(ValueError, match="taken"):
        table.check_free("a")
    table.deliver(final("a"))
    assert queued(stream) == []
    assert not table.abandon(stream)
    table.check_free("a")


def test_abandoning_an_ended_stream_leaves_its_successor_alone() -> None:
    table = StreamTable()
    first = table.open(make_request("a"))
    table.deliver(final("a"))
    second = table.open(make_request("a"))
    assert not table.abandon(first)
    table.deliver(final("a"))
    assert queued(second) == [final("a")]


def test_failure_ends_each_open_stream_with_what_it_was_given() -> None:
    table = StreamTable()
    a, ended = table.open(make_request("a", (1, 2, 3))), table.open(make_request("ended"))
    table.deliver(token("a", 5, 6))
    table.deliver(final("ended"))
    table.fail_all("the engine process died (exit code 1)")
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    assert queued(a)[1:] == [FinalEvent(request_id="a", usage=usage, error="the engine process died (exit code 1)")]
    assert queued(ended) == [final("ended")]
    assert len(table) == 0


def test_an_event_after_the_final_one_is_reported_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    table = StreamTable()
    stream = table.open(make_request("a"))
    table.deliver(final("a"))
    with caplog.at_level(logging.ERROR):
        table.deliver(token("a", 9))
    assert queued(stream) == [final("a")]
    assert "an event after the final one" in caplog.text
