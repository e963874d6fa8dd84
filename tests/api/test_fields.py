"""Each field is implemented, accepted without effect and named, or refused and named; nothing is ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest

from support.api_client import Api, error_of

IGNORED: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "client_metadata": {"a": 1},
    "store": True,
    "safety_identifier": "s",
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {},
}
REFUSED: dict[str, Any] = {
    "session_id": "s",
    "parent_session_id": "s",
    "keep_alive": 60,
    "ephemeral": True,
    "history": "template",
    "include": ["cache"],
    "service_tier": "flex",
}
REFUSED_ON_CHAT: dict[str, Any] = {
    "reasoning_effort": "low",
    "continue_final_message": True,
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "audio": {"voice": "x", "format": "mp3"},
    "prediction": {"type": "content", "content": "x"},
    "web_search_options": {},
    "functions": [{"name": "f"}],
    "function_call": "auto",
}
REFUSED_ON_COMPLETIONS: dict[str, Any] = {"suffix": "x", "best_of": 2, "echo": True}
NEUTRAL_ON_CHAT: dict[str, Any] = {
    "ephemeral": False,
    "include": [],
    "continue_final_message": False,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "n": 1,
}
TOOL_CHOICES: tuple[Any, ...] = (
    "required",
    "any",
    {"type": "function", "function": {"name": "f"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
)


@pytest.mark.parametrize("field", IGNORED)
def test_a_field_without_effect_is_named_in_a_header(api: Api, field: str) -> None:
    for response in (api.chat(**{field: IGNORED[field]}), api.complete(**{field: IGNORED[field]})):
        assert response.status_code == 200
        assert response.headers["X-Sapwood-Ignored"] == field


def test_all_fields_without_effect_are_named_on_a_stream_too(api: Api) -> None:
    options = {"include_usage": True, "include_obfuscation": True}
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    response = api.chat([part], stream=True, stream_options=options, verbosity="low", **IGNORED)
    assert response.status_code == 200
    named = set(response.headers["X-Sapwood-Ignored"].split(", "))
    assert named == {*IGNORED, "verbosity", "stream_options.include_obfuscation", "messages[].cache_control"}


def test_no_header_where_nothing_is_ignored(api: Api) -> None:
    assert "X-Sapwood-Ignored" not in api.chat(temperature=0).headers


@pytest.mark.parametrize("field", REFUSED | REFUSED_ON_CHAT)
def test_what_chat_does_not_implement_is_refused_by_name(api: Api, field: str) -> None:
    error = error_of(api.chat(**{field: (REFUSED | REFUSED_ON_CHAT)[field]}))
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "unsupported_parameter"
    assert "does not implement" in error["message"]


@pytest.mark.parametrize("field", REFUSED | REFUSED_ON_COMPLETIONS)
def test_what_completions_do_not_implement_is_refused_by_name(api: Api, field: str) -> None:
    error = error_of(api.complete(**{field: (REFUSED | REFUSED_ON_COMPLETIONS)[field]}))
    assert error["param"] == field
    assert "does not implement" in error["message"]


@pytest.mark.parametrize("choice", TOOL_CHOICES, ids=str)
def test_a_tool_choice_that_needs_masks_is_refused(api: Api, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert error_of(api.chat(tool_choice=choice, tools=tools))["param"] == "tool_choice"


@pytest.mark.parametrize("field", NEUTRAL_ON_CHAT)
def test_a_value_that_asks_for_nothing_is_accepted(api: Api, field: str) -> None:
    assert api.chat(**{field: NEUTRAL_ON_CHAT[field]}).status_code == 200


def test_null_is_absent(api: Api) -> None:
    fields = dict.fromkeys(
        [
            *IGNORED,
            *REFUSED,
            *REFUSED_ON_CHAT,
            "temperature",
            "stop",
            "n",
            "seed",
            "tools",
            "logit_bias",
            "stream_options",
        ]
    )
    response = api.chat(**fields)
    assert response.status_code == 200
    assert "X-Sapwood-Ignored" not in response.headers


@pytest.mark.parametrize("field", ["best_off", "Temperature", "prompt", "$.x", "a b", "` - at `", ""])
def test_a_field_that_nobody_knows_is_named(api: Api, field: str) -> None:
    error = error_of(api.chat(**{field: 1}))
    assert error["code"] == "unknown_field"
    assert field in error["message"]
    assert error["param"] == field


def test_unknown_fields_inside_are_named_with_their_path(api: Api) -> None:
    message = {"role": "user", "content": "x", "colour": "red"}
    assert error_of(api.chat(messages=[message]))["param"] == "messages[0].colour"
    tool = {"type": "function", "function": {"name": "f", "colour": 1}}
    assert error_of(api.chat(tools=[tool]))["param"] == "tools[0].function.colour"
    assert error_of(api.chat(stream=True, stream_options={"colour": 1}))["param"] == "stream_options.colour"


def test_stream_options_need_a_stream(api: Api) -> None:
    assert error_of(api.chat(stream_options={"include_usage": True}))["param"] == "stream_options"


def test_forced_tokens_need_the_test_hooks(api: Api) -> None:
    error = error_of(api.chat(forced_tokens=[1]))
    assert error["param"] == "forced_tokens"
    assert "--enable-test-hooks" in error["message"]
    assert not any(request.forced_tokens for request in api.engine.requests)
