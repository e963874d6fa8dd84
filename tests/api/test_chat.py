"""Chat completions as the client sees them, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sapwood_server.values.events import FinishReason
from support.api_client import Api, choice_deltas, error_of, events_of, joined_text
from support.api_service import END_ID, MODEL, prompt_text, says

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def rendered(api: Api, *messages: dict[str, Any], **fields: Any) -> str:
    """The prompt that the engine was given for these messages."""
    response = api.chat(messages=list(messages), **fields)
    assert response.status_code == 200, response.text
    return prompt_text(api.engine.requests[-1])


def user(content: Any = "hi") -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content}


def test_a_whole_answer(start: Callable[..., Api]) -> None:
    api = start(says("hello", cached=5))
    body = api.chat().json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    assert body["system_fingerprint"] == "fp_0123456789ab"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt_tokens = len(api.engine.requests[0].prompt_token_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 6,
        "total_tokens": prompt_tokens + 6,
        "prompt_tokens_details": {"cached_tokens": 5},
    }


def test_a_stream_opens_with_the_role_and_closes_with_the_reason(start: Callable[..., Api]) -> None:
    chunks = events_of(start(says("hello")).chat(stream=True))
    deltas = choice_deltas(chunks)
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert [delta["delta"] for delta in deltas[1:]] == [{"content": letter} for letter in "hello"] + [{}]
    assert [delta["finish_reason"] for delta in deltas] == [None] * 6 + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)


def test_pc_10_usage_is_whole_in_one_last_chunk_after_the_reason(start: Callable[..., Api]) -> None:
    chunks = events_of(start(says("hello", cached=3)).chat(**USAGE))
    assert [bool(chunk["usage"]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_cached_tokens_is_an_integer_when_nothing_was_cached(start: Callable[..., Api]) -> None:
    assert start().chat().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("per_event", [1, 2, 3, 7])
def test_st_01_no_delta_holds_half_a_character(start: Callable[..., Api], per_event: int) -> None:
    text = "👩🏽\u200d🚀 你好, ñ!"
    api = start(says(text, per_event=per_event))
    chunks = events_of(api.chat(stream=True))
    parts = [delta["delta"].get("content", "") for delta in choice_deltas(chunks)]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == text == api.chat().json()["choices"][0]["message"]["content"]


def test_st_01_bytes_left_over_at_the_end_follow_one_rule_in_both_modes(
    start: Callable[..., Api],
) -> None:
    api = start(says(b"ok" + "🚀".encode()[:3], finish=FinishReason.LENGTH))
    assert joined_text(events_of(api.chat(stream=True))) == "ok\ufffd"
    assert api.chat().json()["choices"][0]["message"]["content"] == "ok\ufffd"


def test_choices_stream_side_by_side_under_their_indices(start: Callable[..., Api]) -> None:
    api = start(says("ab"))
    chunks = events_of(api.chat(n=3, **USAGE))
    for index in range(3):
        assert joined_text(chunks, index) == "ab"
        assert choice_deltas(chunks, index)[0]["delta"]["role"] == "assistant"
        assert choice_deltas(chunks, index)[-1]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert len(api.chat(n=3).json()["choices"]) == 3


def test_length_is_told(start: Callable[..., Api]) -> None:
    api = start(says("abc", finish=FinishReason.LENGTH))
    assert api.chat().json()["choices"][0]["finish_reason"] == "length"
    assert choice_deltas(events_of(api.chat(stream=True)))[-1]["finish_reason"] == "length"


def test_lm_07_each_token_of_a_chunk_has_its_own_alternatives(start: Callable[..., Api]) -> None:
    api = start(says("abcdefg", per_event=3))
    chunks = events_of(api.chat(logprobs=True, top_logprobs=1, **USAGE))
    entries = [entry for delta in choice_deltas(chunks) for entry in (delta["logprobs"] or {"content": []})["content"]]
    assert len(entries) == chunks[-1]["usage"]["completion_tokens"] == 8
    assert [entry["token"] for entry in entries] == [*"abcdefg", "<|im_end|>"]
    assert [entry["top_logprobs"][0]["token"] for entry in entries[:7]] == [*"abcdefg"]
    assert entries[0] == {
        "token": "a",
        "logprob": -0.5 * (97 % 7 + 1),
        "bytes": [97],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
    }
    assert entries[-1]["bytes"] is None
    whole = api.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]
    assert whole == {"content": entries, "refusal": None}


def test_logprobs_without_alternatives(start: Callable[..., Api]) -> None:
    entries = start(says("ab")).chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in entries] == [[], [], []]


def test_token_ids_come_back_when_asked_for(start: Callable[..., Api]) -> None:
    api = start(says("ab"))
    body = api.chat(return_token_ids=True).json()
    assert body["prompt_token_ids"] == list(api.engine.requests[0].prompt_token_ids)
    assert body["choices"][0]["token_ids"] == [*b"ab", END_ID]
    chunks = events_of(api.chat(return_token_ids=True, stream=True))
    assert chunks[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert [id_ for delta in choice_deltas(chunks) for id_ in delta.get("token_ids", [])] == [*b"ab", END_ID]
    assert "prompt_token_ids" not in api.chat().json()


def test_token_ids_stand_in_place_of_messages(start: Callable[..., Api]) -> None:
    api = start()
    for messages in (None, list[Any]()):
        assert api.chat(messages=messages, prompt_token_ids=[1, 2, 259]).status_code == 200
        assert api.engine.requests[-1].prompt_token_ids == (1, 2, 259)
    assert error_of(api.chat(prompt_token_ids=[1]))["param"] == "prompt_token_ids"
    rendered_with = {"chat_template_kwargs": {"enable_thinking": True}}
    refused = error_of(api.chat(messages=None, prompt_token_ids=[1], **rendered_with))
    assert refused["param"] == "chat_template_kwargs"
    assert error_of(api.chat(messages=None, prompt_token_ids=[260]))["param"] == "prompt_token_ids[0]"
    assert error_of(api.chat(messages=None, prompt_token_ids=[-1]))["param"] == "prompt_token_ids[0]"
    assert error_of(api.chat(messages=None, prompt_token_ids=[]))["param"] == "prompt_token_ids"


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_ms_01_parts_are_joined_by_a_newline(start: Callable[..., Api], role: str) -> None:
    api = start()
    extra = {"tool_call_id": "c1"} if role == "tool" else {}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    as_parts = rendered(api, {"role": role, "content": parts, **extra}, user())
    assert as_parts == rendered(api, {"role": role, "content": "one\ntwo", **extra}, user())


def test_ms_02_null_content_beside_calls_is_like_empty_or_absent(start: Callable[..., Api]) -> None:
    api = start()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    result = {"role": "tool", "content": "r", "tool_call_id": "c1"}
    contents: tuple[dict[str, Any], ...] = ({"content": None}, {"content": ""}, {})
    prompts = {
        rendered(api, user(), {"role": "assistant", "tool_calls": [call], **content}, result, stream=True)
        for content in contents
    }
    assert len(prompts) == 1
    assert 'f{"a": 1}' in prompts.pop()


def test_ms_04_an_empty_list_of_calls_is_none(start: Callable[..., Api]) -> None:
    api = start()
    plain = {"role": "assistant", "content": "x"}
    assert rendered(api, user(), plain | {"tool_calls": []}, user()) == rendered(api, user(), plain, user())


def test_ms_06_a_template_that_refuses_a_late_system_message_is_a_400(
    start: Callable[..., Api],
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}"
        "{{ raise_exception('System message must be at the beginning') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    api = start(templates={"default": template})
    system = {"role": "system", "content": "s"}
    refused = api.chat(messages=[system, user(), {"role": "assistant", "content": "a"}, system, user()])
    assert "System message must be at the beginning" in error_of(refused)["message"]
    assert api.chat(messages=[system, user()]).status_code == 200


def test_ms_07_a_developer_message_is_a_system_message(start: Callable[..., Api]) -> None:
    api = start()
    prompt = rendered(api, {"role": "developer", "content": "be brief"}, user())
    assert prompt == rendered(api, {"role": "system", "content": "be brief"}, user())
    assert "<|im_start|>system\nbe brief" in prompt


def test_tc_09_missing_and_empty_arguments_are_an_empty_object(start: Callable[..., Api]) -> None:
    api = start()
    prompts = set()
    for function in ({"name": "f"}, {"name": "f", "arguments": ""}, {"name": "f", "arguments": "{}"}):
        call = {"id": "c1", "type": "function", "function": function}
        prompts.add(rendered(api, user(), {"role": "assistant", "tool_calls": [call]}, user()))
    assert len(prompts) == 1
    assert "f{}" in prompts.pop()


def test_a_message_as_openais_client_hands_it_back_is_accepted(start: Callable[..., Api]) -> None:
    api = start()
    empty: dict[str, Any] = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls"))
    answer = {"role": "assistant", "content": "a", "annotations": list[Any](), **empty}
    assert rendered(api, user(), answer, user()) == rendered(api, user(), {"role": "assistant", "content": "a"}, user())


def test_tools_reach_the_template_as_they_came(start: Callable[..., Api]) -> None:
    parameters = {"type": "object", "required": ["b"], "properties": {"b": {"type": "string"}, "a": {"enum": [1.0]}}}
    tool = {"function": {"parameters": parameters, "name": "f", "description": "<d>"}, "type": "function"}
    prompt = rendered(start(), user(), tools=[tool], tool_choice="auto")
    assert (
        'tools\n[{"function": {"parameters": {"type": "object", "required": ["b"], '
        '"properties": {"b": {"type": "string"}, "a": {"enum": [1.0]}}}, '
        '"name": "f", "description": "<d>"}, "type": "function"}]'
    ) in prompt


def test_template_options_reach_the_template(start: Callable[..., Api]) -> None:
    api = start(templates={"default": "{{ messages[0].content }}{{ enable_thinking }}"})
    assert rendered(api, user("x"), chat_template_kwargs={"enable_thinking": False}) == "xFalse"
    assert error_of(api.chat(chat_template_kwargs={"tools": []}))["param"] == "chat_template_kwargs"


def test_the_prompt_does_not_depend_on_tool_choice_or_sampling(start: Callable[..., Api]) -> None:
    api = start()
    tool = {"type": "function", "function": {"name": "f"}}
    fields: tuple[dict[str, Any], ...] = ({}, {"tool_choice": "none"}, {"temperature": 0, "seed": 3, "user": "u"})
    assert len({rendered(api, user(), tools=[tool], **more) for more in fields}) == 1


def test_a_model_without_a_template_serves_completions_only(start: Callable[..., Api]) -> None:
    api = start(templates={})
    assert "no chat template" in error_of(api.chat())["message"]
    assert api.chat(messages=None, prompt_token_ids=[1]).status_code == 200
    assert api.complete().status_code == 200
