"""Streams while they run: heartbeats, failures, and clients that go away."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from sapwood_server.values.events import Event, FinishReason
from sapwood_server.values.request import Request
from support.api_client import Api, data_of, error_of
from support.api_service import HANG, MODEL, final, says, tokens

BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1000}
PATIENCE = 20.0
"""Seconds after which a test that waits for something gives up."""


def says_then_hangs(request: Request) -> Iterator[Event | threading.Event]:
    """Five tokens, then nothing."""
    for letter in b"abcde":
        yield tokens(request, bytes([letter]))
    yield HANG


def hangs(_request: Request) -> Iterator[Event | threading.Event]:
    """Nothing at all."""
    yield HANG


def fails_after(count: int) -> Callable[[Request], Iterator[Event | threading.Event]]:
    """Some tokens, then the engine fails."""

    def script(request: Request) -> Iterator[Event | threading.Event]:
        for _ in range(count):
            yield tokens(request, b"a")
        yield final(request, error="the runner raised ValueError: boom")

    return script


def stream(api: Api, **fields: Any) -> Any:
    """An open stream."""
    return api.client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True, **fields})


def test_lc_01_a_client_that_leaves_a_stream_cancels_the_request(start: Callable[..., Api]) -> None:
    api = start(says_then_hangs)
    with stream(api) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
        assert api.engine.cancelled == []
    assert api.engine.cancellation.wait(PATIENCE)
    assert api.engine.cancelled == [api.engine.requests[0].request_id]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_lc_01_a_client_that_leaves_before_the_whole_answer_cancels_it_too(
    start: Callable[..., Api], path: str
) -> None:
    api = start(hangs)
    body = BODY if "chat" in path else {"model": MODEL, "prompt": ["a", "b"]}
    with pytest.raises(httpx.ReadTimeout):
        api.client.post(path, json=body, timeout=0.3)
    assert api.engine.cancellation.wait(PATIENCE)
    wait_until(lambda: len(api.engine.cancelled) == len(api.engine.requests))
    sample = f'sapwood_http_requests_total{{path="{path}",status="499"}}'
    wait_until(lambda: api.metric(sample) == 1)
    assert api.metric('sapwood_request_success_total{finish_reason="cancelled"}') == len(api.engine.requests)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error_of_the_server(
    start: Callable[..., Api], caplog: pytest.LogCaptureFixture
) -> None:
    api = start()
    host, port = api.client.base_url.host, api.client.base_url.port
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection((host, port or 0)) as connection:
        connection.sendall(head.encode() + b"{")
    wait_until(lambda: api.metric('sapwood_http_requests_total{path="/v1/completions",status="499"}') == 1)
    assert "Traceback" not in caplog.text


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns once it holds; fails the test if it never does."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    pytest.fail("the condition never held")


@pytest.mark.parametrize("stream_it", [False, True])
def test_an_engine_that_fails_before_the_first_token_is_a_500(start: Callable[..., Api], stream_it: bool) -> None:
    api = start(fails_after(0))
    error = error_of(api.chat(stream=stream_it), 500)
    assert error["type"] == "server_error"
    assert "boom" in error["message"]


def test_openais_client_does_not_repeat_a_request_that_may_have_broken_the_engine(start: Callable[..., Api]) -> None:
    api = start(fails_after(0))
    with (
        openai.OpenAI(base_url=f"{api.client.base_url}/v1", api_key="none", max_retries=2) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.completions.create(model=MODEL, prompt="x")
    assert len(api.engine.requests) == 1


def test_an_engine_that_fails_later_ends_a_stream_with_one_error_event(start: Callable[..., Api]) -> None:
    api = start(fails_after(2))
    response = api.chat(stream=True, stream_options={"include_usage": True})
    assert response.status_code == 200
    data = data_of(response.text)
    errors = [item for item in data if "error" in json.loads(item)]
    assert errors == data[-1:]
    assert json.loads(errors[0])["error"]["message"] == "the runner raised ValueError: boom"
    assert "[DONE]" not in response.text
    assert error_of(api.chat(), 500)["code"] == "engine_error"
    assert api.metric('sapwood_request_success_total{finish_reason="error"}') == 2


def test_an_engine_that_went_away_is_a_503(start: Callable[..., Api]) -> None:
    api = start(fails_after(0))
    api.engine.ready = False
    for stream_it in (False, True):
        response = api.chat(stream=stream_it)
        assert error_of(response, 503)["type"] == "service_unavailable"
        assert response.headers["Retry-After"] == "1"


def test_a_stream_in_which_nothing_flows_gets_heartbeats(start: Callable[..., Api]) -> None:
    api = start(says_then_hangs, heartbeat_seconds=0.05)
    with stream(api) as response:
        text = ""
        for piece in response.iter_text():
            text += piece
            if text.count(": keep-alive\n\n") == 3:
                break
    assert all(block.startswith(("data: {", ": keep-alive")) for block in text.strip().split("\n\n"))
    assert text.index("keep-alive") > text.rindex('"content":"e"')


def test_heartbeats_begin_before_the_first_token(start: Callable[..., Api]) -> None:
    api = start(hangs, heartbeat_seconds=0.05)
    with stream(api) as response:
        assert response.status_code == 200
        assert next(response.iter_lines()) == ": keep-alive"


def test_an_engine_that_fails_after_a_heartbeat_is_an_error_event(start: Callable[..., Api]) -> None:
    released = threading.Event()

    def script(request: Request) -> Iterator[Event | threading.Event]:
        yield released
        yield final(request, error="boom")

    api = start(script, heartbeat_seconds=0.05)
    with stream(api) as response:
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        released.set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == "boom"


def test_st_04_concurrent_streams_lose_nothing(start: Callable[..., Api]) -> None:
    def script(request: Request) -> Iterator[Event | threading.Event]:
        text = bytes(request.prompt_token_ids) * 100
        yield from says(text, per_event=len(request.prompt_token_ids) % 5 + 1, finish=FinishReason.LENGTH)(request)

    api = start(script)
    texts: dict[int, str] = {}

    def read(number: int) -> None:
        response = api.complete([65 + number] * (number + 1), stream=True)
        chunks = [json.loads(item) for item in data_of(response.text)[:-1]]
        texts[number] = "".join(chunk["choices"][0]["text"] for chunk in chunks)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: chr(65 + number) * (number + 1) * 100 for number in range(24)}
