"""Completions as the client sees them, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sapwood_server.values.events import Event, FinishReason
from sapwood_server.values.request import Request
from support.api_client import Api, choice_deltas, error_of, events_of, joined_text
from support.api_service import BOS_ID, END_ID, MODEL, final, prompt_text, says, tokens


def echoes(request: Request) -> Iterator[Event]:
    """Each choice says its own number and the prompt."""
    for choice in range(request.sampling.n):
        text = f"{choice}{prompt_text(request)}"
        yield tokens(request, text.encode(), choice=choice, finish=FinishReason.LENGTH)
    yield final(request, completion=1)


def prompts_of(api: Api, prompt: Any) -> list[tuple[int, ...]]:
    """The prompts that the engine was given."""
    before = len(api.engine.requests)
    assert api.complete(prompt).status_code == 200
    return sorted(request.prompt_token_ids for request in api.engine.requests[before:])


def test_a_whole_answer(start: Callable[..., Api]) -> None:
    body = start(says("hello", cached=1)).complete("hi").json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_stream(start: Callable[..., Api]) -> None:
    chunks = events_of(start(says("hello")).complete(stream=True, stream_options={"include_usage": True}))
    assert joined_text(chunks) == "hello"
    assert [choice["finish_reason"] for choice in choice_deltas(chunks)] == [None] * 5 + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_every_form_of_a_prompt(start: Callable[..., Api]) -> None:
    api = start(bos_id=BOS_ID)
    assert prompts_of(api, "ab") == [(BOS_ID, *b"ab")]
    assert prompts_of(api, ["ab", "c"]) == [(BOS_ID, *b"ab"), (BOS_ID, *b"c")]
    assert prompts_of(api, [1, 2]) == [(1, 2)]
    assert prompts_of(api, [[1, 2], [3]]) == [(1, 2), (3,)]


@pytest.mark.parametrize("prompt", [[], ["a", 1], [[1], "a"], [[1], 2], [[]], "", [[260]], [-1]])
def test_a_prompt_that_is_none_is_refused(start: Callable[..., Api], prompt: Any) -> None:
    assert error_of(start().complete(prompt))["param"].startswith("prompt")


def test_an_id_outside_the_vocabulary_is_named_with_its_prompt(start: Callable[..., Api]) -> None:
    api = start()
    assert error_of(api.complete([[1], [2, 260]]))["param"] == "prompt[1][1]"
    assert error_of(api.complete([2, 260]))["param"] == "prompt[1]"


def test_choices_are_bounded_over_all_prompts(start: Callable[..., Api]) -> None:
    api = start()
    assert error_of(api.complete([[1]] * 9, n=114))["param"] == "n"
    assert api.engine.requests == []
    assert api.complete([[1]] * 8, n=128).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_numbered_over_prompts(start: Callable[..., Api], stream: bool) -> None:
    api = start(echoes)
    response = api.complete(["a", "b"], n=2, stream=stream)
    if stream:
        chunks = events_of(response)
        texts = [joined_text(chunks, index) for index in range(4)]
    else:
        assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2, 3]
        texts = [choice["text"] for choice in response.json()["choices"]]
        assert response.json()["usage"]["prompt_tokens"] == 2
    assert texts == ["0a", "1a", "0b", "1b"]


def test_logprobs_are_parallel_lists(start: Callable[..., Api]) -> None:
    api = start(says("añb", per_event=2))
    logprobs = api.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xb1", "b", "<|im_end|>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.5 * (id_ % 7 + 1) for id_ in (*"añb".encode(), END_ID)]
    assert logprobs["top_logprobs"][0] == {"a": -0.5 * (97 % 7 + 1)}
    streamed = choice_deltas(events_of(api.complete(logprobs=1, stream=True)))
    for field, values in logprobs.items():
        assert [value for choice in streamed for value in choice["logprobs"][field]] == values


def test_logprobs_0_has_no_alternatives(start: Callable[..., Api]) -> None:
    logprobs = start(says("ab")).complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert len(logprobs["token_logprobs"]) == 3


def test_an_impossible_token_has_a_finite_logprob(start: Callable[..., Api]) -> None:
    def script(request: Request) -> Iterator[Event]:
        event = tokens(request, b"a")
        impossible = event.logprobs[0].__class__(token_id=97, logprob=float("-inf"), top=((98, float("-inf")),))
        yield event.__class__(request_id=event.request_id, choice=0, token_ids=(97,), data=b"a", logprobs=(impossible,))
        yield final(request)

    logprobs = start(script).complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert logprobs["top_logprobs"] == [{"a": -9999.0, "b": -9999.0}]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_back_with_each_choice(start: Callable[..., Api], stream: bool) -> None:
    api = start(says("ab"))
    one = api.complete([5, 6], return_token_ids=True, stream=stream)
    two = api.complete([[5, 6], [7]], return_token_ids=True, stream=stream)
    first = events_of(one)[0] if stream else one.json()
    both = events_of(two)[0] if stream else two.json()
    assert first["prompt_token_ids"] == [5, 6]
    assert [choice["prompt_token_ids"] for choice in both["choices"]] == [[5, 6], [7]]
    choices = choice_deltas(events_of(one) if stream else [one.json()])
    assert [id_ for choice in choices for id_ in choice.get("token_ids", [])] == [*b"ab", END_ID]
