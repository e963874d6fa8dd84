"""Prompts of megabytes: refused early if they can't fit, else made beside all that the server has to do meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import httpx
import pytest

from sapwood_server.api.app import create_app
from sapwood_server.api.prompt_threads import BIG_BODY_BYTES, MOST_BIG, MOST_BIG_AT_ONCE
from sapwood_server.chat.messages import Message, Tool
from sapwood_server.chat.prompt import PromptEncoder
from support.api_client import Api, error_of
from support.api_service import MODEL, ScriptedEngine, make_service, running, says

ROOMY = {"max_model_len": 10**6, "num_pages": 10**5}
PATIENCE_SECONDS = 60.0
GONE = 'sapwood_http_requests_total{path="/v1/chat/completions",status="499"}'


class HeldEncoder(PromptEncoder):
    """Encodes a conversation that says "big" only when it is let."""

    entered: ClassVar[threading.Semaphore]
    leave: ClassVar[threading.Event]

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> tuple[int, ...]:
        if messages[0].content.startswith("big"):
            self.entered.release()
            assert self.leave.wait(PATIENCE_SECONDS)
        return (1, 2, 3)


class QuickEncoder(PromptEncoder):
    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> tuple[int, ...]:
        return (1, 2, 3)


def encoder_of(kind: type[PromptEncoder], service_prompts: PromptEncoder) -> PromptEncoder:
    return kind(**vars(service_prompts))


def test_more_messages_than_the_context_has_tokens_are_refused_before_they_are_rendered() -> None:
    engine = ScriptedEngine(says("ok"), max_model_len=1000)
    template = {"default": "{{ raise_exception('rendered') }}"}
    with running(make_service(engine, templates=template)) as url, httpx.Client(base_url=url, timeout=30) as client:
        refusals = [
            client.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": ""}] * count}
            )
            for count in (999, 1000, 100_000)
        ]
    codes = [error_of(response)["code"] for response in refusals]
    assert codes == ["template_error", "context_length_exceeded", "context_length_exceeded"]
    assert error_of(refusals[2])["message"] == (
        "This model's maximum context length is 1000 tokens. However, your messages resulted in 100000 tokens or more."
    )
    assert error_of(refusals[2])["param"] == "messages"


@pytest.fixture(name="held")
def held_fixture() -> Iterator[Api]:
    """A server that holds on to big conversations; they are let go at the end."""
    HeldEncoder.entered, HeldEncoder.leave = threading.Semaphore(0), threading.Event()
    engine = ScriptedEngine(says("ok"), **ROOMY)
    service = make_service(engine)
    service = replace(service, prompts=encoder_of(HeldEncoder, service.prompts))
    with running(service) as url, httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
        try:
            yield Api(engine, client)
        finally:
            HeldEncoder.leave.set()


def ask_big(held: Api) -> int:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "big" + "x" * BIG_BODY_BYTES}]}
    url = held.client.base_url.join("/v1/chat/completions")
    return httpx.post(url, json=body, timeout=PATIENCE_SECONDS).status_code


def leave_big(held: Api) -> None:
    """Sends a big request, and goes away without waiting for its answer, until the server has noticed."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "big" + "x" * BIG_BODY_BYTES}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    gone = held.metric(GONE)
    address = (held.client.base_url.host, held.client.base_url.port or 80)
    with socket.create_connection(address, timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n{body}".encode())
    while held.metric(GONE) == gone:
        assert held.chat("small").status_code == 200


def wait_until_rendering() -> None:
    for _ in range(MOST_BIG_AT_ONCE):
        assert HeldEncoder.entered.acquire(timeout=PATIENCE_SECONDS)


def test_small_requests_are_answered_while_big_ones_are_rendered_and_too_many_are_turned_away(held: Api) -> None:
    """However many: here more than asyncio has threads."""
    num_too_many = 30
    with ThreadPoolExecutor(MOST_BIG + num_too_many) as clients:
        answers = [clients.submit(ask_big, held) for _ in range(MOST_BIG + num_too_many)]
        wait_until_rendering()
        assert [held.chat("small").status_code for _ in range(20)] == [200] * 20
        while sum(answer.done() for answer in answers) < num_too_many:
            assert held.chat("small").status_code == 200
        assert not HeldEncoder.entered.acquire(blocking=False), "more big ones than may be rendered at once"
        HeldEncoder.leave.set()
        statuses = sorted(answer.result() for answer in answers)
    assert statuses == [200] * MOST_BIG + [503] * num_too_many


def test_a_client_that_leaves_the_queue_is_not_rendered(held: Api) -> None:
    with ThreadPoolExecutor(MOST_BIG_AT_ONCE) as clients:
        answers = [clients.submit(ask_big, held) for _ in range(MOST_BIG_AT_ONCE)]
        wait_until_rendering()
        for _ in range(MOST_BIG):  # each would take a place if it did not give it back
            leave_big(held)
        HeldEncoder.leave.set()
        assert [answer.result() for answer in answers] == [200] * MOST_BIG_AT_ONCE
        assert ask_big(held) == 200
    assert HeldEncoder.entered.acquire(blocking=False)
    assert not HeldEncoder.entered.acquire(blocking=False), "one that had left was rendered"


def test_a_thread_whose_client_has_left_is_not_given_away(held: Api) -> None:
    with ThreadPoolExecutor(1) as clients:
        for _ in range(MOST_BIG_AT_ONCE):
            leave_big(held)
        wait_until_rendering()
        answer = clients.submit(ask_big, held)
        for _ in range(20):
            assert held.chat("small").status_code == 200
        assert not HeldEncoder.entered.acquire(blocking=False), "a third one is rendered beside the two"
        HeldEncoder.leave.set()
        assert answer.result() == 200


def test_the_loop_turns_while_messages_are_converted() -> None:
    service = make_service(ScriptedEngine(says("ok"), **ROOMY))
    service = replace(service, prompts=encoder_of(QuickEncoder, service.prompts))
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}] * 100_000}).encode()

    async def turns_during(content: bytes) -> int:
        transport = httpx.ASGITransport(app=create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Content-Type": "application/json"}
            asked = asyncio.create_task(client.post("/v1/chat/completions", content=content, headers=headers))
            turns = 0
            while not asked.done():
                await asyncio.sleep(0)
                turns += 1
            assert asked.result().status_code == 200
        return turns

    small = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]}).encode()
    assert asyncio.run(turns_during(body)) > 10 * asyncio.run(turns_during(small))
