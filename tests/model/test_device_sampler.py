"""The sampler by kernels: the settings' definitions, as the CPU's sampler has them, and its independence of the batch.

What K7 and K8 compute is tested with them; here is what they are given, and what is made of what they give.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sapwood_kernels.dispatch_triton import triton_ops
from sapwood_kernels.sample import SamplingTensors, sample
from sapwood_server.model.device_sampler import DeviceSampler
from sapwood_server.model.sampler import Sampler
from sapwood_server.values.plan import DrawFailure, FailedDraw, SampleSpec
from sapwood_server.values.sampling import SamplingParams
from support.draws import ids_of, made
from support.scale import scaled

VOCAB = 40
PADDING = 6
NUM_TOKENS = VOCAB - PADDING


def spec(sampling: SamplingParams, *, key: int = 1, choice: int = 0, **fields: Any) -> SampleSpec:
    return SampleSpec(
        choice_key=key, choice=choice, sampling=sampling, **{"prompt_ids": (1, 2), "output_ids": (), **fields}
    )


def device_sampler(num_tokens: int = NUM_TOKENS) -> DeviceSampler:
    return DeviceSampler(VOCAB, num_tokens, torch.device("cpu"), triton_ops())


def cpu_sampler(num_tokens: int = NUM_TOKENS) -> Sampler:
    return Sampler(VOCAB, num_tokens=num_tokens)


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


# With a single token left by the filters, the two samplers have no draw to differ in.
CERTAIN: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"temperature": 0.0}, {"temperature": 1e-39}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
)
EDITS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([-2.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.7]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "logit_bias": st.sampled_from([(), ((3, 100.0),), ((0, -100.0), (7, 2.5), (VOCAB - 1, 100.0))]),
    }
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(data=st.data(), num_rows=st.integers(1, 5), seed=st.integers(0, 2**32))
@settings(max_examples=scaled(200, 5))
def test_what_is_certain_is_the_cpu_samplers(data: st.DataObject, num_rows: int, seed: int) -> None:
    logits = random_logits(num_rows, seed)
    specs = [
        spec(
            SamplingParams(
                **data.draw(CERTAIN), **data.draw(EDITS), seed=row, top_logprobs=data.draw(st.none() | st.just(3))
            ),
            key=row,
            prompt_ids=data.draw(TOKENS),
            output_ids=data.draw(TOKENS),
            banned_ids=data.draw(st.sampled_from([(), (2,), (2, 5, VOCAB - 2)])),
            forced=data.draw(st.sampled_from([None, None, 17])),
        )
        for row in range(num_rows)
    ]
    wanted = made(cpu_sampler().sample(logits, specs))
    found = made(device_sampler().sample(logits.clone(), specs))
    assert [one.token_id for one in found] == [one.token_id for one in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.logprob is None) == (theirs.logprob is None)
        if mine.logprob is not None and theirs.logprob is not None:
            assert mine.logprob.token_id == mine.token_id
            assert mine.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-5)
            assert [id_ for id_, _ in mine.logprob.top] == [id_ for id_, _ in theirs.logprob.top]
            values = [value for _, value in theirs.logprob.top]
            assert [value for _, value in mine.logprob.top] == pytest.approx(values, abs=1e-5)


def test_logprobs_of_equal_tokens_come_by_id_and_never_of_padding() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, NUM_TOKENS:] = math.nan
    [one] = made(device_sampler().sample(logits.clone(), [spec(SamplingParams(temperature=0, top_logprobs=100))]))
    assert one.token_id == 0
    assert one.logprob is not None
    assert [id_ for id_, _ in one.logprob.top] == list(range(NUM_TOKENS))
    assert one.logprob.logprob == pytest.approx(-math.log(NUM_TOKENS), abs=1e-5)


def test_a_forced_id_of_the_padding_has_no_probability() -> None:
    params = SamplingParams(temperature=0.0, top_logprobs=1)
    [one] = made(device_sampler().sample(random_logits(1), [spec(params, forced=VOCAB - 1)]))
    assert one.token_id == VOCAB - 1
    assert one.logprob is not None
    assert one.logprob.logprob == -math.inf


def test_keys_and_settings_reach_the_kernel() -> None:
    """Seeds of 64 bits, choices, positions and filters, row by row; what it makes of them is its own test's."""
    seeds, choices, positions = [0, 1, 2**63, 2**64 - 1], [0, 3, 1, 0], [0, 5, 700, 2]
    top_k, top_p, min_p, temperature = (
        [0, 5, 1000, 3],
        [1.0, 0.9, 0.3, 1.0],
        [0.0, 0.1, 0.0, 0.2],
        [1.0, 0.5, 2.0, 1e-39],
    )
    logits = random_logits(4, 3)
    specs = [
        spec(
            SamplingParams(
                seed=seeds[row], top_k=top_k[row], top_p=top_p[row], min_p=min_p[row], temperature=temperature[row]
            ),
            choice=choices[row],
            output_ids=range(positions[row]),
        )
        for row in range(4)
    ]
    wanted = sample(
        logits[:, :NUM_TOKENS],
        SamplingTensors(
            temperature=torch.tensor([1.0, 0.5, 2.0, 0.0]),
            top_k=torch.tensor([0, 5, NUM_TOKENS, 3], dtype=torch.int32),
            top_p=torch.tensor(top_p),
            min_p=torch.tensor(min_p),
            seed=torch.tensor([0, 1, -(2**63), -1]),
            choice=torch.tensor(choices, dtype=torch.int32),
            position=torch.tensor(positions, dtype=torch.int32),
        ),
    )
    assert ids_of(device_sampler().sample(logits.clone(), specs)) == wanted.tolist()


def test_the_same_whatever_else_is_in_the_batch() -> None:
    random_ = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.5},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 7, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"temperature": 2.0, "min_p": 0.1, "top_logprobs": 3},
    ]
    count = len(kinds)
    logits = random_logits(count, 9)
    specs = [
        spec(SamplingParams(seed=2**64 - 1 - row, **kind), key=row, output_ids=[row] * row)
        for row, kind in enumerate(kinds)
    ]
    alone = [device_sampler().sample(logits[row : row + 1].clone(), specs[row : row + 1])[0] for row in range(count)]
    for _ in range(scaled(20, 1)):
        order = random_.sample(range(count), random_.randint(2, count))
        assert device_sampler().sample(logits[order], [specs[row] for row in order]) == [alone[row] for row in order]


def test_counts_grow_with_the_output_and_are_dropped_with_the_choice() -> None:
    sampler, reference = device_sampler(), cpu_sampler()
    params = SamplingParams(temperature=0, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.1)
    logits = random_logits(1, 4)
    output: list[int] = []
    for step in range(16):
        if step == 11:
            del output[7:]
        [token_id] = ids_of(sampler.sample(logits.clone(), [spec(params, output_ids=output)]))
        assert [token_id] == ids_of(reference.sample(logits, [spec(params, output_ids=output)]))
        output.append(token_id)
    assert len(set(output)) > 3
    assert sampler.num_kept == 1
    sampler.drop([1, 99])
    assert sampler.num_kept == 0


MATES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=2, top_p=0.9, top_logprobs=3),
    SamplingParams(temperature=1.0, seed=3, top_k=5, frequency_penalty=0.5, logit_bias=((3, 2.0),)),
]


def check_failure(logits: Tensor, row: int, failing: SampleSpec, failure: DrawFailure) -> None:
    """The draw of `row` fails, and the batch's others are those that are made without it, logprobs included."""
    others = [spec(one, key=index, output_ids=[index] * index) for index, one in enumerate(MATES)]
    rest = [index for index in range(len(logits)) if index != row]
    expected = made(device_sampler(VOCAB).sample(logits[rest], others))
    specs: Sequence[SampleSpec] = [*others[:row], failing, *others[row:]]
    draws = device_sampler(VOCAB).sample(logits.clone(), specs)
    assert draws.pop(row) == FailedDraw(failure)
    assert draws == expected


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ([math.nan], {}),
        ([math.inf], {"forced": 7}),
        ([-math.inf] * VOCAB, {"forced": 7}),
        ([-math.inf, math.nan], {"banned_ids": (VOCAB - 1,)}),
    ],
)
def test_logits_that_are_not_finite_fail_their_own_draw(values: list[float], fields: dict[str, Any]) -> None:
    """Banning the ids that have them does not hide it, and forcing another makes no good KV."""
    logits = random_logits(4, 1)
    logits[2, VOCAB - len(values) :] = torch.tensor(values)
    failing = spec(SamplingParams(top_logprobs=2), key=9, output_ids=[4], **fields)
    check_failure(logits, 2, failing, DrawFailure.NOT_FINITE)


@pytest.mark.parametrize(
    "hopeless",
    [
        spec(SamplingParams(), key=9, banned_ids=tuple(range(VOCAB))),
        spec(SamplingParams(temperature=0.0, top_logprobs=1), key=9, banned_ids=tuple(range(VOCAB))),
        spec(SamplingParams(temperature=0.0, repetition_penalty=1e-45), key=9, prompt_ids=range(VOCAB)),
    ],
    ids=["all banned", "all banned, greedy", "over the largest number"],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning")
def test_settings_that_leave_no_token_fail_their_own_draw(hopeless: SampleSpec) -> None:
    check_failure(random_logits(4, 1), 1, hopeless, DrawFailure.NOTHING_LEFT)


def test_wrong_shapes_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 39\]; expected fp32 \[1, 40\]"):
        device_sampler().sample(torch.zeros(1, 39), [spec(SamplingParams())])
    with pytest.raises(ValueError, match="bfloat16"):
        device_sampler().sample(torch.zeros(1, VOCAB, dtype=torch.bfloat16), [spec(SamplingParams())])
    with pytest.raises(ValueError, match="num_tokens is 41; expected 1 to vocab_size, 40"):
        device_sampler(41)
    assert device_sampler().sample(torch.zeros(0, VOCAB), []) == []
