"""Prompts and budgets against the context and the pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sapwood_server.api.length import LengthRules, RequestFields
from sapwood_server.errors import BadRequestError
from support.api_client import Api, error_of

CONTEXT = {"max_model_len": 100}
POOL = {"max_model_len": 10_000, "num_pages": 5}
"""64 tokens: page 0 is reserved."""


def ids(count: int) -> list[int]:
    """A prompt of so many tokens."""
    return [7] * count


def test_lm_01_a_prompt_that_leaves_no_room_is_refused_in_openais_words(start: Callable[..., Api]) -> None:
    api = start(info=CONTEXT)
    error = error_of(api.chat(messages=None, prompt_token_ids=ids(100)))
    assert error["message"] == (
        "This model's maximum context length is 100 tokens. However, your messages resulted in 100 tokens."
    )
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert error_of(api.complete(ids(101)))["code"] == "context_length_exceeded"
    assert api.complete(ids(99)).status_code == 200
    assert [len(request.prompt_token_ids) for request in api.engine.requests] == [99]


def test_lm_02_nothing_is_cut_from_an_over_long_conversation(start: Callable[..., Api]) -> None:
    api = start(info=CONTEXT)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "the password is hunter2"},
        {"role": "user", "content": "call f"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "x" * 60, "tool_call_id": "c1"},
    ]
    for stream in (False, True):
        error = error_of(api.chat(messages=messages, stream=stream))
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 100 tokens" in error["message"]
    assert api.engine.requests == []


def test_a_budget_over_the_context_is_lowered_to_the_room_left(start: Callable[..., Api]) -> None:
    api = start(info=CONTEXT)
    assert api.complete(ids(60), max_tokens=41).status_code == 200
    assert api.complete(ids(60), max_tokens=10**30).status_code == 200
    assert [request.sampling.max_tokens for request in api.engine.requests] == [40, 40]


def test_a_budget_over_the_context_is_refused_where_that_was_asked_for(start: Callable[..., Api]) -> None:
    api = start(info=CONTEXT, strict_max_tokens=True)
    error = error_of(api.complete(ids(60), max_tokens=41))
    assert error["code"] == "context_length_exceeded"
    assert "101 tokens" in error["message"]
    assert api.complete(ids(60), max_tokens=40).status_code == 200


def test_lm_03_a_need_larger_than_the_pool_is_refused_with_both_numbers(start: Callable[..., Api]) -> None:
    api = start(info=POOL)
    prompt = error_of(api.complete(ids(65)))
    assert "65" in prompt["message"]
    assert "64" in prompt["message"]
    stated = error_of(api.complete(ids(10), max_tokens=55))
    assert "65 tokens" in stated["message"]
    assert "64" in stated["message"]
    assert api.engine.requests == []
    assert api.complete(ids(10), max_tokens=54).status_code == 200
    assert api.complete(ids(10)).status_code == 200
    assert api.engine.requests[-1].sampling.max_tokens is None


@pytest.mark.parametrize("sent", [["max_tokens"], ["max_completion_tokens"], ["max_tokens", "max_completion_tokens"]])
def test_an_error_about_the_length_names_the_field_that_was_sent(start: Callable[..., Api], sent: list[str]) -> None:
    strict, small = start(info=CONTEXT, strict_max_tokens=True), start(info=POOL)
    refused = [
        strict.chat(messages=None, prompt_token_ids=ids(60), **dict.fromkeys(sent, 41)),
        small.chat(messages=None, prompt_token_ids=ids(10), **dict.fromkeys(sent, 55)),
        small.chat(**dict.fromkeys(sent, 0)),
    ]
    assert [error_of(response)["param"] for response in refused] == [sent[-1]] * 3
    too_few = error_of(small.chat(min_tokens=6, **dict.fromkeys(sent, 5)))
    assert (too_few["param"], f"{sent[-1]}, 5" in too_few["message"]) == ("min_tokens", True)


@pytest.mark.parametrize("prompt_tokens", range(1, 12))
@pytest.mark.parametrize("max_tokens", [None, 1, 4, 100])
def test_whatever_is_accepted_fits(prompt_tokens: int, max_tokens: int | None) -> None:
    rules = LengthRules(context=10, pool=8, strict=False)
    try:
        budget = rules.budget(prompt_tokens, max_tokens, RequestFields(prompt="prompt", length="max_tokens"))
    except BadRequestError:
        need = prompt_tokens + min(max_tokens or 1, max(10 - prompt_tokens, 1))
        assert need > 8
    else:
        assert prompt_tokens + (budget or 1) <= 8
