"""Values: those in range reach the engine, those outside are refused with the field, the value and what is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sapwood_server.values.sampling import SamplingParams
from support.api_client import Api, error_of
from support.api_service import END_ID

OUT_OF_RANGE: tuple[tuple[str, Any], ...] = (
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", 1e30),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", 1e4),
    ("stop_token_ids", list(range(129))),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 129),
    ("n", 10**30),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [str(number) for number in range(17)]),
    ("stop", "x" * 1025),
    ("stop", ["x", "é" * 513]),
    ("priority", 2**31),
    ("logit_bias", {"260": 1}),
    ("logit_bias", {f"{number:04}": 1 for number in range(1025)}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"\u0663": 1}),
    ("top_logprobs", 1),
)


def sampling(api: Api, **fields: Any) -> SamplingParams:
    """What the engine was told."""
    response = api.chat(**fields)
    assert response.status_code == 200, response.text
    return api.engine.requests[-1].sampling


def test_every_setting_reaches_the_engine(api: Api) -> None:
    same = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.2,
        "seed": 7,
        "max_tokens": 10,
        "min_tokens": 2,
        "ignore_eos": True,
        "n": 2,
        "top_logprobs": 20,
    }
    others = {"logit_bias": {"5": -100, "007": 1.5}, "stop": ["a", "b"], "stop_token_ids": [3]}
    got = msgspec.structs.asdict(sampling(api, logprobs=True, **same, **others))
    expected = {"logit_bias": ((5, -100.0), (7, 1.5)), "stop": (b"a", b"b"), "stop_token_ids": (3,)}
    assert got == same | expected
    assert got.keys() == set(SamplingParams.__struct_fields__)


def test_defaults_are_openais(api: Api) -> None:
    got = sampling(api)
    assert (got.temperature, got.top_p, got.n, got.max_tokens, got.top_logprobs) == (1.0, 1.0, 1, None, None)


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE, ids=lambda part: str(part)[:24])
def test_a_value_out_of_range_is_refused(api: Api, field: str, value: Any) -> None:
    error = error_of(api.chat(**{field: value}))
    assert error["param"] == field
    assert field in error["message"]
    assert "accepted" in error["message"]


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {"5": 100.5}), ("stop_token_ids", [1, 260])], ids=str)
def test_an_entry_out_of_range_is_named(api: Api, field: str, value: Any) -> None:
    assert error_of(api.chat(**{field: value}))["param"] in ("logit_bias[5]", "stop_token_ids[1]")


def test_lm_05_a_bias_outside_the_vocabulary_harms_nobody_else(api: Api) -> None:
    before = len(api.engine.requests)
    for bias in ({"5": 1, "260": 1}, {"-1": 1}, {"five": 1}):
        error = error_of(api.chat(logit_bias=bias))
        assert error["param"] == "logit_bias"
        assert "0 to 259" in error["message"]
    assert len(api.engine.requests) == before
    assert api.chat(logit_bias={"259": 1}).status_code == 200


def test_top_k_off_and_over_the_vocabulary(api: Api) -> None:
    assert [sampling(api, top_k=value).top_k for value in (-1, 0, 5, 10**6)] == [0, 0, 5, 260]


def test_seeds_are_64_bits_whatever_their_sign(api: Api) -> None:
    assert sampling(api, seed=-1).seed == 2**64 - 1
    assert sampling(api, seed=-(2**63)).seed == 2**63
    assert sampling(api, seed=2**64 - 1).seed == 2**64 - 1


def test_requests_without_a_seed_get_different_ones(api: Api) -> None:
    assert len({sampling(api).seed for _ in range(3)}) == 3


def test_both_names_of_the_token_limit(api: Api) -> None:
    assert sampling(api, max_completion_tokens=5).max_tokens == 5
    assert sampling(api, max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert error_of(api.chat(max_completion_tokens=5, max_tokens=6))["param"] == "max_tokens"


def test_min_tokens_may_not_exceed_the_limit(api: Api) -> None:
    assert error_of(api.chat(min_tokens=6, max_tokens=5))["param"] == "min_tokens"


@pytest.mark.parametrize("value", [21, -1])
def test_top_logprobs_go_from_0_to_20(api: Api, value: int) -> None:
    assert error_of(api.chat(logprobs=True, top_logprobs=value))["param"] == "top_logprobs"
    assert error_of(api.complete(logprobs=value))["param"] == "logprobs"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "banana", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant"}, {"role": "user", "content": "x"}], "messages[0].content"),
        ([{"role": "assistant", "content": "x"}], "messages[0].role"),
        ([{"role": "assistant", "refusal": "no"}, {"role": "user", "content": "x"}], "messages[0].refusal"),
        (
            [
                {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "function": {"name": "f"}}]},
                {"role": "user", "content": "x"},
            ],
            "messages[0].tool_calls[0].type",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "function": {}}]}, {"role": "user", "content": "x"}],
            "messages[0].tool_calls[0].function.name",
        ),
    ],
    ids=str,
)
def test_a_malformed_message_is_refused_with_its_place(api: Api, messages: Any, param: str) -> None:
    error = error_of(api.chat(messages=messages))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_ms_07_an_unknown_role_is_named_with_the_known_ones(api: Api) -> None:
    message = error_of(api.chat(messages=[{"role": "banana", "content": "x"}]))["message"]
    assert "banana" in message
    assert "developer" in message


def test_ms_09_after_empty_messages_the_server_keeps_serving(api: Api) -> None:
    error = error_of(api.chat(messages=[]))
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    assert api.chat().status_code == 200


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({}, "tools[0].type"),
        ({"type": "custom", "custom": {"name": "f"}}, "tools[0].type"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "f", "description": 5}}, "tools[0].function.description"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[0].function.parameters"),
        ({"type": "function", "function": {"name": "f", "strict": True}}, "tools[0].function.strict"),
    ],
    ids=str,
)
def test_a_malformed_tool_is_refused_with_its_place(api: Api, tool: Any, param: str) -> None:
    assert error_of(api.chat(tools=[tool]))["param"] == param


def test_an_unknown_model_is_a_404(api: Api) -> None:
    error = error_of(api.chat(model="gpt-9"), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-9" in error["message"]


def test_every_served_name_is_accepted_and_echoed(start: Callable[..., Api]) -> None:
    api = start(model_names=("org/big", "small"))
    assert [entry["id"] for entry in api.client.get("/v1/models").json()["data"]] == ["org/big", "small"]
    for name in ("org/big", "small"):
        assert api.chat(model=name).json()["model"] == name
        assert api.client.get(f"/v1/models/{name}").json()["id"] == name
    assert error_of(api.client.get("/v1/models/scripted"), 404)["code"] == "model_not_found"


def test_salt_and_priority_reach_the_engine(api: Api) -> None:
    api.chat(cache_salt="s", priority=-3)
    assert api.engine.requests[-1].priority == -3
    salts = []
    for fields in ({}, {"cache_salt": "s"}, {"cache_salt": "t"}):
        api.chat(**fields)
        salts.append(api.engine.requests[-1].salt)
    assert len(set(salts)) == 3


FORCED: tuple[tuple[Any, int, Any], ...] = (
    ([1, 2], 1, ((1, 2),)),
    ([], 1, ((),)),
    ("ab", 1, ((97, 98, END_ID),)),
    ([[1], "b"], 2, ((1,), (98, END_ID))),
)


@pytest.mark.parametrize(("forced", "n", "expected"), FORCED, ids=str)
def test_forced_tokens_reach_the_engine(start: Callable[..., Api], forced: Any, n: int, expected: Any) -> None:
    api = start(enable_test_hooks=True)
    assert api.chat(forced_tokens=forced, n=n).status_code == 200
    assert api.engine.requests[-1].forced_tokens == expected


def test_forced_tokens_of_several_prompts_go_to_their_choices(start: Callable[..., Api]) -> None:
    api = start(enable_test_hooks=True)
    assert api.complete([[7], [8]], n=2, forced_tokens=[[1], [2], [3], [4]]).status_code == 200
    forced = {request.prompt_token_ids: request.forced_tokens for request in api.engine.requests}
    assert forced == {(7,): ((1,), (2,)), (8,): ((3,), (4,))}


@pytest.mark.parametrize(("forced", "n"), [([1], 2), ([[1]], 2), ([1, [2]], 2), ("a", 2), ([260], 1), ([[-1]], 1)])
def test_malformed_forced_tokens_are_refused(start: Callable[..., Api], forced: Any, n: int) -> None:
    assert error_of(start(enable_test_hooks=True).chat(forced_tokens=forced, n=n))["param"].startswith("forced_tokens")
