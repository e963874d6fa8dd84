"""A conversation with the embedded demo model, through OpenAI's client."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from sapwood_server.values.demo import DEMO_MODEL
from support.api_client import metric_value
from support.cached import Resident
from support.scale import scaled

TURNS = scaled(20, 5)
SHARING = scaled(16, 4)
SENTENCE = "The sapwood is the living outer layer of a tree, and it carries water from the roots to the leaves. "


@pytest.fixture(name="url", scope="module")
def url_fixture(serve: Any) -> str:
    url: str = serve(DEMO_MODEL, "--max-model-len", "4096", "--enable-test-hooks")
    return url


@pytest.fixture(name="smollm2", scope="module")
def smollm2_fixture(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    """The greedy answer, with its ids."""
    body = {"return_token_ids": True, **fields}
    return client.chat.completions.create(
        model=DEMO_MODEL, messages=messages, temperature=0, max_tokens=24, extra_body=body
    )


def test_it_knows_the_capital_of_france(smollm2: openai.OpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    whole = ask(smollm2, question).choices[0].message.content
    assert "Paris" in whole
    stream = smollm2.chat.completions.create(
        model=DEMO_MODEL, messages=question, temperature=0, max_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


@pytest.mark.parametrize("forced", [False, True])
def test_each_turn_of_a_conversation_reuses_all_that_is_resident(smollm2: openai.OpenAI, forced: bool) -> None:
    resident = Resident()
    messages: list[Any] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Tell me one thing about the number {turn}."})
        hooks = {"forced_tokens": f"{turn} is followed by {turn + 1}."} if forced else {}
        answer = ask(smollm2, messages, cache_salt=f"turns-{forced}", **hooks)
        prompt = answer.model_extra["prompt_token_ids"]
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.prompt_tokens_details.cached_tokens == resident.expected(prompt)
        if turn:
            assert answer.usage.prompt_tokens_details.cached_tokens > 0
        resident.add(prompt, answer.choices[0].model_extra["token_ids"])
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def test_requests_sent_at_once_compute_their_common_prefix_once(smollm2: openai.OpenAI, url: str) -> None:
    def send(number: int) -> Any:
        prompt = SENTENCE * 50 + f"Question {number}: what does it carry?"
        return smollm2.completions.create(
            model=DEMO_MODEL, prompt=prompt, max_tokens=2, extra_body={"return_token_ids": True, "cache_salt": "once"}
        )

    def computed() -> float:
        return metric_value(httpx.get(f"{url}/metrics").text, 'sapwood_prompt_tokens_total{source="computed"}')

    before = computed()
    with concurrent.futures.ThreadPoolExecutor(SHARING) as pool:
        answers = list(pool.map(send, range(SHARING)))
    after = computed()
    prompts = sorted(tuple(answer.model_extra["prompt_token_ids"]) for answer in answers)
    shared = [
        next(index for index, (one, other) in enumerate(zip(prompts[0], prompt, strict=False)) if one != other)
        for prompt in prompts[1:]
    ]
    assert min(shared) >= 1000
    cached = sorted(answer.usage.prompt_tokens_details.cached_tokens for answer in answers)
    assert cached[0] == 0
    assert all(count >= min(shared) for count in cached[1:])
    assert after - before == sum(map(len, prompts)) - sum(cached)
