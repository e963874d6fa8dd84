"""Every reusable token is reused, seen from OpenAI's client: what `cached_tokens` must say, computed from the ids."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.api_client import metric_value
from support.cached import Resident

COMPUTED = 'sapwood_prompt_tokens_total{source="computed"}'
CACHED = 'sapwood_prompt_tokens_total{source="device"}'
TURNS = 20


def ids(count: int, start: int = 0) -> list[int]:
    """Some ids of the tiny vocabulary, no special ones."""
    return [3 + (start + 7 * index) % 250 for index in range(count)]


def cached_tokens(answer: Any) -> int:
    """What the answer says; it always says it."""
    count = answer.usage.prompt_tokens_details.cached_tokens
    assert isinstance(count, int)
    return count


def complete(client: openai.OpenAI, prompt: Sequence[int], **fields: Any) -> Any:
    """A completion of one token, unless `extra_body` says otherwise."""
    return client.completions.create(**{"model": "tiny", "prompt": list(prompt), "max_tokens": 1, **fields})


def test_a_conversation_reuses_every_token_that_is_resident(client: openai.OpenAI) -> None:
    resident = Resident()
    messages: list[Any] = [{"role": "system", "content": "You are a test."}]
    hits = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"question {turn}: " + "why " * (turn % 5)})
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            extra_body={
                "forced_tokens": f"answer {turn}, because of {turn * 37}",
                "return_token_ids": True,
                "cache_salt": "conversation",
            },
        )
        prompt: list[int] = answer.model_extra["prompt_token_ids"] if answer.model_extra else []
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.content == f"answer {turn}, because of {turn * 37}"
        assert cached_tokens(answer) == resident.expected(prompt)
        resident.add(prompt, choice.model_extra["token_ids"] if choice.model_extra else [])
        messages.append({"role": "assistant", "content": choice.message.content})
        hits.append(cached_tokens(answer))
    assert hits[0] == 0
    assert hits == sorted(hits)
    assert hits[-1] > 400


def test_token_ids_that_only_grow_miss_one_token_of_each_answer(client: openai.OpenAI) -> None:
    prompt = ids(23)
    expected = 0
    for turn in range(TURNS):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[],
            max_tokens=9,
            temperature=0,
            extra_body={"prompt_token_ids": prompt, "return_token_ids": True, "ignore_eos": True, "cache_salt": "grow"},
        )
        assert cached_tokens(answer) == expected
        extra = answer.choices[0].model_extra
        generated: list[int] = extra["token_ids"] if extra else []
        assert len(generated) == 9
        expected = len(prompt) + 8
        prompt = prompt + generated + ids(turn % 6 + 1, start=turn)


def test_a_repeated_prompt_computes_its_last_token_only(client: openai.OpenAI) -> None:
    prompt = ids(333, start=11)
    assert [cached_tokens(complete(client, prompt)) for _ in range(2)] == [0, 332]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 100])
def test_a_hit_ends_at_the_very_token_where_prompts_part(client: openai.OpenAI, length: int) -> None:
    first, second = ids(120, start=50), ids(120, start=50)
    second[length] = 300 - second[length]
    salt = {"cache_salt": f"part-{length}"}
    complete(client, first, extra_body=salt)
    assert cached_tokens(complete(client, second, extra_body=salt)) == length


def test_pc_08_a_stream_reports_cached_tokens_both_times(client: openai.OpenAI) -> None:
    reported = []
    for _ in range(2):
        stream = complete(client, ids(48, start=99), stream=True, stream_options={"include_usage": True})
        usages = [chunk.usage for chunk in stream if chunk.usage is not None]
        assert len(usages) == 1
        reported.append(usages[0].prompt_tokens_details.cached_tokens)
    assert reported == [0, 47]


def test_sixteen_requests_at_once_compute_their_common_prefix_once(client: openai.OpenAI, tiny_url: str) -> None:
    prefix = ids(1000, start=5)
    prompts = [[*prefix, 10 + number, *ids(7)] for number in range(16)]
    before = httpx.get(f"{tiny_url}/metrics").text
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: complete(client, prompt), prompts))
    after = httpx.get(f"{tiny_url}/metrics").text
    assert metric_value(after, COMPUTED) - metric_value(before, COMPUTED) == 1000 + 16 * 8
    assert metric_value(after, CACHED) - metric_value(before, CACHED) == 15 * 1000
    assert sorted(map(cached_tokens, answers)) == [0] + [1000] * 15


def test_pc_11_one_keys_prompt_is_no_hit_for_another(tiny_model: Path, serve: Any) -> None:
    url = serve(tiny_model, "--dtype", "float32", "--kv-memory", "64MiB", "--api-key", "first", "--api-key", "second")
    secret = ids(2000, start=3)
    first, second = (openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in ("first", "second"))
    with first, second:
        assert cached_tokens(complete(first, secret)) == 0
        assert cached_tokens(complete(second, secret)) == 0
        assert cached_tokens(complete(first, secret)) == 1999
        assert cached_tokens(complete(second, secret)) == 1999
        assert cached_tokens(complete(first, secret, extra_body={"cache_salt": "apart"})) == 0
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="third", max_retries=0).models.list()


def test_without_the_prefix_cache_nothing_is_reused(tiny_model: Path, serve: Any) -> None:
    url = serve(tiny_model, "--dtype", "float32", "--kv-memory", "64MiB", "--no-prefix-cache")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [cached_tokens(complete(client, ids(100))) for _ in range(2)] == [0, 0]
