"""Prompts of megabytes: refused early if they can't fit, else made beside all that the server has to do meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx

from sapwood_server.api.app import create_app
from sapwood_server.api.prompt_threads import BIG_BODY_BYTES, MOST_BIG_AT_ONCE
from sapwood_server.chat.messages import Message, Tool
from sapwood_server.chat.prompt import PromptEncoder
from support.api_client import error_of
from support.api_service import MODEL, ScriptedEngine, make_service, running, says

ROOMY = {"max_model_len": 10**6, "num_pages": 10**5}
PATIENCE_SECONDS = 60.0


class HeldEncoder(PromptEncoder):
    """Encodes a conversation that says "big" only when it is let."""

    entered = threading.Semaphore(0)
    leave = threading.Event()

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


def test_small_requests_are_answered_while_big_ones_are_rendered() -> None:
    """However many: here twice as many as asyncio has threads."""
    service = make_service(ScriptedEngine(says("ok"), **ROOMY))
    service = replace(service, prompts=encoder_of(HeldEncoder, service.prompts))
    num_big = 2 * (MOST_BIG_AT_ONCE + 32)
    big = "big" + "x" * BIG_BODY_BYTES

    def ask(content: str) -> int:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS).status_code

    with running(service) as url, ThreadPoolExecutor(num_big) as clients:
        answers = [clients.submit(ask, big) for _ in range(num_big)]
        try:
            for _ in range(MOST_BIG_AT_ONCE):
                assert HeldEncoder.entered.acquire(timeout=PATIENCE_SECONDS)
            assert [ask("small") for _ in range(20)] == [200] * 20
            assert not HeldEncoder.entered.acquire(blocking=False), "more big ones than may be rendered at once"
        finally:
            HeldEncoder.leave.set()
        assert [answer.result() for answer in answers] == [200] * num_big


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
