"""A message shows the beginning of what a client sent, never all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sapwood_server.quoting import LINE_CHARACTERS, QUOTE_CHARACTERS
from support.api_client import Api, error_of
from support.api_service import ScriptedEngine, make_service, running, says

LONG = "x" * 50_000
REFUSING_TEMPLATE = "{{ raise_exception('never: ' + messages[0].content) }}"
USER = {"role": "user", "content": "x"}

CHAT_FIELDS: dict[str, dict[str, Any]] = {
    "model": {"model": LONG},
    "unknown field": {LONG: 1},
    "number": {"temperature": LONG},
    "list": {"stop": [1, LONG]},
    "role": {"messages": [{"role": LONG, "content": "x"}]},
    "field of a message": {"messages": [{"role": "user", "content": "x", LONG: 1}]},
    "part": {"messages": [{"role": "user", "content": [{"type": LONG, "text": "x"}]}]},
    "call": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "c", "type": LONG, "function": {"name": "f"}}]},
            USER,
        ]
    },
    "tool": {"tools": [{"type": LONG}]},
    "tool's name": {"tools": [{"type": "function", "function": {"name": LONG}}]},
    "tool's field": {"tools": [{"type": "function", "function": {"name": "f", LONG: 1}}]},
    "not implemented": {"response_format": {"type": "json_schema", "json_schema": {"name": LONG}}},
    "service tier": {"service_tier": LONG},
    "logit bias": {"logit_bias": {LONG: 1}},
    "template's variable": {"chat_template_kwargs": {"messages": LONG}},
    "template's own words": {"messages": [{"role": "user", "content": LONG}]},
    "forced tokens": {"forced_tokens": [1, LONG]},
}


@pytest.fixture(name="refusing", scope="module")
def refusing_fixture() -> Iterator[Api]:
    """A server whose template refuses every conversation and quotes it."""
    engine = ScriptedEngine(says("ok"))
    service = make_service(engine, templates={"default": REFUSING_TEMPLATE}, enable_test_hooks=True)
    with running(service) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield Api(engine, client)


def check(error: dict[str, Any]) -> None:
    assert len(error["message"]) < QUOTE_CHARACTERS + LINE_CHARACTERS
    assert len(error["param"] or "") < 2 * QUOTE_CHARACTERS


@pytest.mark.parametrize("fields", CHAT_FIELDS.values(), ids=CHAT_FIELDS)
def test_a_long_value_of_a_chat_is_quoted_short(refusing: Api, fields: dict[str, Any]) -> None:
    body = {"model": "scripted", "messages": [USER], **fields}
    response = refusing.client.post("/v1/chat/completions", json=body)
    check(error_of(response, 404 if "model" in fields else 400))


@pytest.mark.parametrize("fields", [{"prompt": [1, LONG]}, {"prompt": {LONG: 1}}, {"suffix": LONG}, {"best_of": LONG}])
def test_a_long_value_of_a_completion_is_quoted_short(api: Api, fields: dict[str, Any]) -> None:
    body = {"model": "scripted", "prompt": "x", **fields}
    check(error_of(api.client.post("/v1/completions", json=body)))


@pytest.mark.parametrize("path", [f"/{LONG}", f"/v1/models/{LONG}"], ids=["route", "model"])
def test_a_long_path_is_quoted_short(api: Api, path: str) -> None:
    check(error_of(api.client.get(path), 404))


def test_a_long_media_type_and_a_long_method_are_quoted_short(api: Api) -> None:
    check(error_of(api.client.post("/v1/completions", content=b"{}", headers={"Content-Type": LONG}), 415))
    check(error_of(api.client.request("X" * 5000, "/v1/models"), 405))
