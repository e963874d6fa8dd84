from __future__ import annotations

import dataclasses

import pytest

from sapwood_server.engine.limits import SchedulerLimits, completion_budget
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams
from support.scheduler_world import make_limits

_LIMITS = make_limits(num_pages=10, page_size=4, max_model_len=30)  # the pool holds 40 tokens


def _request(prompt: int, max_tokens: int | None) -> Request:
    return Request(
        request_id="r", prompt_token_ids=(1,) * prompt, sampling=SamplingParams(max_tokens=max_tokens), salt=""
    )


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "max_model_len", "budget"),
    [
        (10, 5, 30, 5),
        (10, 20, 30, 20),
        (10, 21, 30, 20),
        (10, 10_000, 30, 20),
        (29, 5, 30, 1),
        (10, None, 30, 20),
        (10, None, 1000, 30),
        (39, None, 1000, 1),
        (10, 30, 1000, 30),
    ],
)
def test_budget_is_what_was_asked_within_context_and_pool(
    prompt: int, max_tokens: int | None, max_model_len: int, budget: int
) -> None:
    limits = dataclasses.replace(_LIMITS, max_model_len=max_model_len)
    assert completion_budget(_request(prompt, max_tokens), limits) == budget


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "max_model_len", "message"),
    [
        (0, 5, 30, "the prompt has 0 tokens"),
        (5, 0, 30, "max_tokens is 0"),
        (30, 5, 30, "prompt has 30 tokens and the context holds 30"),
        (31, None, 30, "prompt has 31 tokens and the context holds 30"),
        (10, 31, 1000, "needs room for 41 tokens, the KV pool holds 40"),
        (40, None, 1000, "needs room for 41 tokens, the KV pool holds 40"),
        (10, 10_000, 1000, "needs room for 1000 tokens, the KV pool holds 40"),
    ],
)
def test_what_can_never_run_is_refused_with_both_numbers(
    prompt: int, max_tokens: int | None, max_model_len: int, message: str
) -> None:
    limits = dataclasses.replace(_LIMITS, max_model_len=max_model_len)
    with pytest.raises(ValueError, match=message):
        completion_budget(_request(prompt, max_tokens), limits)


def test_strict_refuses_instead_of_lowering() -> None:
    limits = dataclasses.replace(_LIMITS, strict_max_tokens=True)
    assert completion_budget(_request(10, 20), limits) == 20
    with pytest.raises(ValueError, match="prompt and max_tokens are 31 tokens, the context holds 30"):
        completion_budget(_request(10, 21), limits)


@pytest.mark.parametrize("name", ["num_pages", "page_size", "max_num_seqs", "max_batched_tokens", "max_model_len"])
def test_limits_of_nothing_are_refused(name: str) -> None:
    def build(**changes: int) -> SchedulerLimits:
        sizes = {"num_pages": 2, "page_size": 1, "max_num_seqs": 1, "max_batched_tokens": 1, "max_model_len": 1}
        sizes.update(changes)
        return SchedulerLimits(
            num_pages=sizes["num_pages"],
            page_size=sizes["page_size"],
            max_num_seqs=sizes["max_num_seqs"],
            max_batched_tokens=sizes["max_batched_tokens"],
            max_model_len=sizes["max_model_len"],
        )

    build()
    with pytest.raises(ValueError, match=f"{name} is 0; accepted: at least"):
        build(**{name: 0})


def test_pool_tokens_leave_out_the_reserved_page() -> None:
    limits = SchedulerLimits(num_pages=3, page_size=16, max_num_seqs=1, max_batched_tokens=1, max_model_len=1)
    assert limits.pool_tokens == 32
