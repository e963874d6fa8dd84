"""OpenAI's client against the real server, engine and all, on a tiny random model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.api_client import metric_value
from support.tiny_models import END_ID

PATIENCE_SECONDS = 30.0
TEXT = "The quick brown fox jumps over the lazy dog."


def chat(client: openai.OpenAI, content: str = "hello world", **fields: Any) -> Any:
    """A chat request with one user message."""
    messages: list[Any] = [{"role": "user", "content": content}]
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, "max_tokens": 16, **fields})


def text_of(answer: Any) -> str:
    """The text of the first choice."""
    content = answer.choices[0].message.content
    assert isinstance(content, str)
    return content


def streamed_text(stream: Any) -> str:
    """The joined deltas of the first choice."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns once it holds; fails the test if it never does."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.05)):
        if condition():
            return
        pause.wait(0.05)
    pytest.fail("the condition never held")


def test_the_model_is_listed_with_its_context(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 4096
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(client, model="gpt-9")


def test_a_stream_and_a_whole_answer_say_the_same(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0)
    assert streamed_text(chat(client, temperature=0, stream=True)) == text_of(whole)
    assert whole.usage.completion_tokens <= 16
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_forced_text_comes_back_and_ends_the_turn(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=None, extra_body={"forced_tokens": TEXT, "return_token_ids": True})
    assert text_of(answer) == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["token_ids"][-1] == END_ID


def test_st_01_characters_of_several_tokens_stream_whole(client: openai.OpenAI) -> None:
    text = "👩🏽\u200d🚀 你好 ñandú"
    stream = chat(client, max_tokens=None, stream=True, extra_body={"forced_tokens": text})
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == text


def test_st_01_a_cut_character_is_one_replacement_in_both_modes(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=None, extra_body={"forced_tokens": "ok 🚀", "return_token_ids": True})
    count = len(answer.choices[0].model_extra["token_ids"]) - 2  # without the end token and the rocket's last byte
    cut: dict[str, Any] = {"max_tokens": count, "extra_body": {"forced_tokens": "ok 🚀"}}
    assert text_of(chat(client, **cut)) == "ok \ufffd"
    assert streamed_text(chat(client, stream=True, **cut)) == "ok \ufffd"


@pytest.mark.parametrize("stop", ["DEFGHIJ", ["x", "DEFGHIJ", "HIJK"]])
def test_st_02_nothing_of_a_stop_string_is_sent(client: openai.OpenAI, stop: Any) -> None:
    fields = {"max_tokens": None, "stop": stop, "extra_body": {"forced_tokens": "ABCDEFGHIJKLMNOP"}}
    whole = chat(client, **fields)
    assert text_of(whole) == "ABC"
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(chat(client, stream=True, **fields))
    assert streamed_text(chunks) == "ABC"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_string_that_never_completes_is_sent(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"max_tokens": None, "stop": "DEFGHIJ", "extra_body": {"forced_tokens": "ABCDEFGHI"}}
    assert streamed_text(chat(client, stream=True, **fields)) == "ABCDEFGHI"


def test_stop_token_ids_and_the_limit_end_an_answer(client: openai.OpenAI) -> None:
    ids = list(range(50, 70))
    body = {"forced_tokens": ids, "return_token_ids": True}
    stopped = chat(client, max_tokens=None, extra_body={**body, "stop_token_ids": [60]})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].model_extra["token_ids"] == ids[:11]
    limited = chat(client, max_tokens=4, extra_body=body)
    assert limited.choices[0].finish_reason == "length"
    assert limited.choices[0].model_extra["token_ids"] == ids[:4]


def test_st_04_concurrent_streams_equal_the_same_requests_alone(client: openai.OpenAI) -> None:
    def ask(number: int, *, stream: bool) -> str:
        fields: dict[str, Any] = {"temperature": 0.8, "seed": number, "max_tokens": 40 + number, "stream": stream}
        answer = chat(client, f"question {number}", **fields)
        return streamed_text(answer) if stream else text_of(answer)

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        streamed = list(pool.map(lambda number: ask(number, stream=True), range(24)))
    assert streamed == [ask(number, stream=False) for number in range(24)]


def test_lm_07_entries_of_a_stream_are_as_many_as_its_tokens(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "temperature": 0, "max_tokens": 12}
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **fields))
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert len(entries) == chunks[-1].usage.completion_tokens
    assert all(len(entry.top_logprobs) == 1 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in entries)


def test_lm_08_a_seed_gives_the_same_text_whatever_the_batch(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 0.5, "seed": 123, "max_tokens": 32, "extra_body": {"ignore_eos": True}}
    alone = [text_of(chat(client, **fields)) for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        others = [pool.submit(chat, client, f"other {number}", max_tokens=48) for number in range(15)]
        crowded = pool.submit(chat, client, **fields)
        texts = {*alone, text_of(crowded.result())}
        concurrent.futures.wait(others)
    assert len(texts) == 1
    triples = [[choice.message.content for choice in chat(client, n=3, **fields).choices] for _ in range(2)]
    assert triples[0] == triples[1]
    assert len(set(triples[0])) == 3
    assert triples[0][0] == alone[0]


def test_more_choices_than_run_at_once_all_end(tiny_model: Path, serve: Any) -> None:
    url = serve(tiny_model, "--max-num-seqs", "2", "--kv-memory", "4MiB")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = chat(client, n=5, max_tokens=3, extra_body={"ignore_eos": True})
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 5
    assert answer.usage.completion_tokens == 15


def test_lm_03_what_the_pool_can_never_hold_is_refused_and_the_next_is_served(tiny_model: Path, serve: Any) -> None:
    url = serve(tiny_model, "--kv-memory", "64KiB")
    engine = httpx.get(f"{url}/version").json()["engine"]
    pool, context = (engine["num_pages"] - 1) * engine["page_size"], engine["max_model_len"]
    assert pool < context - 1
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for prompt, max_tokens in ((pool + 1, 1), (pool, 1), (pool - 10, 11)):
            with pytest.raises(openai.BadRequestError, match=f"KV pool holds {pool}") as caught:
                client.completions.create(model="tiny", prompt=[5] * prompt, max_tokens=max_tokens)
            assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match=f"maximum context length is {context} tokens"):
            client.completions.create(model="tiny", prompt=[5] * (context + 1), max_tokens=1)
        assert client.completions.create(model="tiny", prompt=[5], max_tokens=1).choices[0].finish_reason == "length"
        for fields in ({"max_tokens": 10}, {}):
            filled = client.completions.create(
                model="tiny", prompt=[5] * (pool - 10), extra_body={"ignore_eos": True, **fields}
            )
            assert filled.usage is not None
            assert filled.usage.total_tokens == pool
    metrics = httpx.get(f"{url}/metrics").text
    assert metric_value(metrics, "sapwood_requests_waiting") == 0


def endless(client: openai.OpenAI, url: str, leave: Callable[[openai.OpenAI], None]) -> Iterator[dict[str, float]]:
    """The metrics while an endless request runs, then each time after its client has left."""
    leave(client)
    names = ("requests_running", "generation_tokens_total", 'kv_pages{state="active"}')
    while True:
        text = httpx.get(f"{url}/metrics").text
        yield {name: metric_value(text, f"sapwood_{name}") for name in names}


def leave_a_stream(client: openai.OpenAI) -> None:
    """Read five chunks, then close."""
    stream = chat(client, max_tokens=3500, stream=True, extra_body={"ignore_eos": True})
    with stream:
        for _, _chunk in zip(range(5), stream, strict=False):
            pass


def leave_a_whole_answer(client: openai.OpenAI) -> None:
    """Lose patience before it comes."""
    with pytest.raises(openai.APITimeoutError):
        chat(client, max_tokens=3500, timeout=0.5, extra_body={"ignore_eos": True})


@pytest.mark.parametrize("leave", [leave_a_stream, leave_a_whole_answer])
def test_lc_01_a_client_that_leaves_frees_its_pages(
    client: openai.OpenAI, tiny_url: str, leave: Callable[[openai.OpenAI], None]
) -> None:
    samples = endless(client, tiny_url, leave)
    wait_until(lambda: next(samples)["requests_running"] == 0)
    after = next(samples)
    assert after['kv_pages{state="active"}'] == 0
    assert next(samples)["generation_tokens_total"] == after["generation_tokens_total"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"temperature": 3}, "temperature"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"extra_body": {"colour": "red"}}, "colour"),
        ({"extra_body": {"session_id": "x"}}, "session_id"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"),
    ],
    ids=str,
)
def test_bad_input_is_a_typed_error_of_the_client(client: openai.OpenAI, fields: dict[str, Any], param: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert caught.value.type == "invalid_request_error"
    assert param is None or caught.value.param == param
    assert chat(client, max_tokens=1).choices[0].finish_reason in ("stop", "length")


def test_asynchronous_client(client: openai.OpenAI) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as other:
            stream = await other.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                extra_body={"forced_tokens": TEXT},
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == TEXT
