"""Every value at every field: an answer or a 4xx with the error object, never a 5xx."""

from __future__ import annotations

from typing import Any

import pytest

from sapwood_server.api.wire_chat import ChatBody
from sapwood_server.api.wire_completions import CompletionBody
from support.api_client import Api, error_of
from support.scale import scaled

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    1e308,
    10**18,
    10**30,
    -(2**63),
    "",
    "x",
    "\x00",
    "\u2028\U0001f680",
    "1" * 1000,
    [],
    [[]],
    [None],
    [1, "x", [2]],
    ["x"],
    [[1]],
    [{}],
    [True],
    {},
    {"": None},
    {"x": {"y": [1, {"z": "w"}]}},
    {"type": "text"},
    {"role": "user", "content": "x"},
    [{"role": "user", "content": [{"type": "text", "text": ""}]}],
    [{"role": "assistant", "content": [], "tool_calls": [{}]}],
    [{"type": "function", "function": {"name": "f", "parameters": {"a": [None]}}}],
)


def values_for(*names: str) -> list[Any]:
    """All values; in a slice some, others for other names."""
    start = sum(map(len, names))
    return [VALUES[(start + 5 * index) % len(VALUES)] for index in range(scaled(len(VALUES), 6))]


def check(api: Api, path: str, body: dict[str, Any]) -> None:
    """An answer, or a refusal of the right shape."""
    response = api.client.post(path, json=body)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, (body, response.text)
        error = error_of(response, response.status_code)
        assert error["type"] == "invalid_request_error"
        assert error["code"] is not None


@pytest.mark.parametrize("field", ChatBody.__struct_fields__)
def test_any_value_at_any_field_of_chat(api: Api, field: str) -> None:
    for value in values_for(field):
        body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], field: value}
        check(api, "/v1/chat/completions", body)


@pytest.mark.parametrize("field", CompletionBody.__struct_fields__)
def test_any_value_at_any_field_of_completions(api: Api, field: str) -> None:
    for value in values_for(field):
        check(api, "/v1/completions", {"model": "scripted", "prompt": "x", field: value})


@pytest.mark.parametrize(
    "path", ["role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "annotations", "audio"]
)
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_any_value_at_any_field_of_a_message(api: Api, role: str, path: str) -> None:
    for value in values_for(role, path):
        message = {"role": role, "content": "x", path: value}
        messages = [message, {"role": "user", "content": "x"}]
        check(api, "/v1/chat/completions", {"model": "scripted", "messages": messages})
