"""The sampler against the settings' definitions, one row at a time, and its independence of batch and past."""

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

from sapwood_server.model.random_stream import uniforms
from sapwood_server.model.sampler import Sampler
from sapwood_server.values.plan import DrawFailure, FailedDraw, SampleSpec
from sapwood_server.values.sampling import SamplingParams
from support.draws import ids_of, made
from support.scale import scaled

VOCAB = 40
PADDING = 6


def spec(
    sampling: SamplingParams,
    *,
    key: int = 1,
    choice: int = 0,
    prompt: Sequence[int] = (1, 2),
    output: Sequence[int] = (),
    forced: int | None = None,
    banned: tuple[int, ...] = (),
) -> SampleSpec:
    return SampleSpec(
        choice_key=key,
        choice=choice,
        sampling=sampling,
        prompt_ids=prompt,
        output_ids=output,
        forced=forced,
        banned_ids=banned,
    )


def random_logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def plain_sample(logits: list[float], wanted: SampleSpec, num_tokens: int) -> int:
    """`SamplingParams`' order of operations on one row of Python floats."""
    params, row = wanted.sampling, list(logits[:num_tokens])
    for id_, bias in params.logit_bias:
        row[id_] += bias
    for id_ in set(wanted.prompt_ids) | set(wanted.output_ids):
        if id_ < num_tokens:
            penalty = params.repetition_penalty
            row[id_] = row[id_] / penalty if row[id_] > 0 else row[id_] * penalty
    for id_ in set(wanted.output_ids):
        if id_ < num_tokens:
            row[id_] -= params.presence_penalty + params.frequency_penalty * list(wanted.output_ids).count(id_)
    for id_ in wanted.banned_ids:
        row[id_] = -math.inf
    if params.temperature == 0:
        return row.index(max(row))
    weights = [math.exp((value - max(row)) / params.temperature) for value in row]
    kept = sorted(range(num_tokens), key=lambda id_: (-weights[id_], id_))
    if params.top_k:
        kept = kept[: params.top_k]
    total, mass = sum(weights[id_] for id_ in kept), 0.0
    nucleus: list[int] = []
    for id_ in kept:
        if params.top_p == 1.0 or not nucleus or mass < params.top_p * total:
            nucleus.append(id_)
            mass += weights[id_]
    kept = [id_ for id_ in nucleus if weights[id_] >= params.min_p * weights[kept[0]]]
    filtered = params.top_k or params.top_p < 1 or params.min_p > 0
    kept = kept if filtered else sorted(kept)  # the CDF is over the ranking only where a ranking is needed
    target = uniforms([params.seed], [wanted.choice], [len(wanted.output_ids)])[0] * sum(weights[id_] for id_ in kept)
    for id_ in kept:
        target -= weights[id_]
        if target < 0:
            return id_
    return kept[-1]


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 100.0),), ((0, -100.0), (7, 2.5))]),
    seed=st.integers(0, 2**64 - 1),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@given(data=st.data(), num_rows=st.integers(1, 6), seed=st.integers(0, 2**32))
@settings(max_examples=scaled(1500, 60))
def test_every_setting_does_what_its_definition_says(data: st.DataObject, num_rows: int, seed: int) -> None:
    logits = random_logits(num_rows, seed)
    before = logits.clone()
    specs = [
        spec(
            data.draw(SAMPLINGS),
            key=row,
            choice=data.draw(st.integers(0, 3)),
            prompt=data.draw(TOKENS),
            output=data.draw(TOKENS),
            banned=data.draw(st.sampled_from([(), (2,), (2, 5, 6)])),
        )
        for row in range(num_rows)
    ]
    drawn = ids_of(Sampler(VOCAB, num_tokens=VOCAB - PADDING).sample(logits, specs))
    expected = [plain_sample(logits[row].tolist(), specs[row], VOCAB - PADDING) for row in range(num_rows)]
    assert drawn == expected
    assert torch.equal(logits, before)


def test_greedy_takes_the_smallest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [9, 30]] = 2.0
    logits[2, VOCAB - 1] = 5.0  # padding
    draws = Sampler(VOCAB, num_tokens=VOCAB - PADDING).sample(logits, [spec(SamplingParams(temperature=0))] * 3)
    assert ids_of(draws) == [0, 9, 0]


def test_padding_is_never_drawn_nor_an_alternative() -> None:
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, VOCAB - PADDING :] = 50.0
    sampler = Sampler(VOCAB, num_tokens=VOCAB - PADDING)
    for seed in range(scaled(500, 50)):
        [one] = made(sampler.sample(logits, [spec(SamplingParams(seed=seed, top_logprobs=20))]))
        assert one.token_id < VOCAB - PADDING
        assert one.logprob is not None
        assert [id_ for id_, _ in one.logprob.top] == list(range(20))
    biased = spec(SamplingParams(temperature=0, logit_bias=((VOCAB - 1, 100.0),)), banned=(VOCAB - 2,))
    assert ids_of(sampler.sample(logits, [biased])) == [0]


@pytest.mark.parametrize("padding", [0.0, 50.0, -math.inf, math.inf, math.nan])
def test_logprobs_know_nothing_of_the_padding(padding: float) -> None:
    """A checkpoint may hold anything in the rows of its head that no token has."""
    logits = random_logits(2, 5)
    specs = [spec(MATES[2]), spec(SamplingParams(top_logprobs=VOCAB), forced=3)]
    expected = made(Sampler(VOCAB - PADDING).sample(logits[:, : VOCAB - PADDING].contiguous(), specs))
    logits[:, VOCAB - PADDING :] = padding
    assert made(Sampler(VOCAB, num_tokens=VOCAB - PADDING).sample(logits, specs)) == expected


def test_a_padding_id_that_is_forced_had_no_chance() -> None:
    forced = spec(SamplingParams(top_logprobs=1), forced=VOCAB - 1)
    [one] = made(Sampler(VOCAB, num_tokens=VOCAB - PADDING).sample(random_logits(1, 5), [forced]))
    assert one.logprob is not None
    assert (one.token_id, one.logprob.logprob) == (VOCAB - 1, -math.inf)


def test_draws_follow_the_distribution() -> None:
    """Chi-square of draws over positions against the softmax, with and without filters."""
    count = scaled(40_000, 4_000)
    logits = random_logits(1, 3)[:, :12].contiguous()
    for params in (SamplingParams(seed=11), SamplingParams(seed=12, top_p=0.97, temperature=1.7)):
        rows = [spec(params, output=range(position)) for position in range(count)]
        drawn = ids_of(Sampler(12).sample(logits.expand(count, -1).contiguous(), rows))
        expected = (logits[0] / params.temperature).softmax(-1).double()
        if params.top_p < 1:
            order = expected.argsort(descending=True)
            before = expected[order].cumsum(0) - expected[order]
            expected[order[before >= params.top_p]] = 0
            expected /= expected.sum()
        observed = torch.bincount(torch.tensor(drawn), minlength=12).double()
        assert not observed[expected == 0].any()
        likely = expected * count > 5
        chi_square = float(((observed - expected * count) ** 2 / (expected * count))[likely].sum())
        assert chi_square < 11 + 5 * math.sqrt(22)


def test_the_same_whatever_else_is_in_the_batch() -> None:
    """lm-08: alone, twice, and among others of every kind; the shapes and the order of the batch change nothing."""
    random_ = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.5},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 7, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"temperature": 2.0, "min_p": 0.1, "top_logprobs": 3},
    ]
    vocab = 3001
    logits = random_logits(16, 9, vocab)
    specs = [
        spec(SamplingParams(seed=123 + row // 5, **kinds[row % 5]), key=row, output=[row] * row) for row in range(16)
    ]
    alone = [Sampler(vocab).sample(logits[row : row + 1], specs[row : row + 1])[0] for row in range(16)]
    for _ in range(scaled(40, 4)):
        order = random_.sample(range(16), random_.randint(1, 16))
        together = Sampler(vocab).sample(logits[order], [specs[row] for row in order])
        assert together == [alone[row] for row in order]


def test_choices_of_one_request_differ_and_repeat() -> None:
    logits = random_logits(1, 2).expand(3, -1).contiguous()

    def run() -> list[list[int]]:
        sampler = Sampler(VOCAB)
        texts: list[list[int]] = [[], [], []]
        for _ in range(12):
            specs = [spec(SamplingParams(seed=123), key=c, choice=c, output=texts[c]) for c in range(3)]
            for text, token_id in zip(texts, ids_of(sampler.sample(logits, specs)), strict=True):
                text.append(token_id)
        return texts

    first = run()
    assert first == run()
    assert len({tuple(text) for text in first}) == 3


def test_counts_grow_with_the_output_and_are_dropped_with_the_choice() -> None:
    """Step by step as the scheduler calls it, against the whole recount; a shorter output starts over."""
    sampler = Sampler(VOCAB)
    params = SamplingParams(temperature=0, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.1)
    logits = random_logits(1, 4)
    output: list[int] = []
    for step in range(60):
        if step == 40:
            del output[7:]
        wanted = spec(params, output=output)
        [token_id] = ids_of(sampler.sample(logits, [wanted]))
        assert token_id == plain_sample(logits[0].tolist(), wanted, VOCAB)
        output.append(token_id)
    assert len(set(output)) > 5
    other = spec(params, key=2, output=[])
    assert ids_of(sampler.sample(logits, [other])) == [plain_sample(logits[0].tolist(), other, VOCAB)]
    sampler.drop([1, 2, 99])
    reused = spec(params, key=1, prompt=(), output=[5])
    assert ids_of(sampler.sample(logits, [reused])) == [plain_sample(logits[0].tolist(), reused, VOCAB)]


def test_logprobs_are_the_models_own() -> None:
    """Before bias, penalties and temperature; equal ones by id; the chosen token's even if it is not among the top."""
    logits = random_logits(4, 8)
    logits[2] = 0.0
    plain = logits.double().log_softmax(-1)
    params = [
        SamplingParams(temperature=0, logit_bias=((5, 100.0),), top_logprobs=3),
        SamplingParams(temperature=0.1, top_k=1, top_logprobs=0),
        SamplingParams(temperature=0, top_logprobs=5),
        SamplingParams(temperature=0),
    ]
    sampled = made(Sampler(VOCAB).sample(logits, [spec(one) for one in params]))
    first, second, third, fourth = (one.logprob for one in sampled)
    assert sampled[0].token_id == 5
    assert first is not None
    assert first.logprob == pytest.approx(float(plain[0, 5]), abs=1e-5)
    assert [id_ for id_, _ in first.top] == plain[0].argsort(descending=True)[:3].tolist()
    assert [value for _, value in first.top] == pytest.approx(
        plain[0].sort(descending=True).values[:3].tolist(), abs=1e-5
    )
    assert second is not None
    assert (second.token_id, second.top) == (int(logits[1].argmax()), ())
    assert third is not None
    assert [id_ for id_, _ in third.top] == [0, 1, 2, 3, 4]
    assert third.logprob == pytest.approx(-math.log(VOCAB), abs=1e-5)
    assert fourth is None


def test_forced_ids_replace_the_draw_and_keep_the_logprob() -> None:
    logits = random_logits(2, 1)
    plain = logits.double().log_softmax(-1)
    params = SamplingParams(seed=1, top_logprobs=2, frequency_penalty=1.0)
    free = spec(params, key=2, output=[4])
    sampled = made(Sampler(VOCAB).sample(logits, [spec(params, forced=17, banned=(17,)), free]))
    assert sampled[0].token_id == 17
    assert sampled[0].logprob is not None
    assert sampled[0].logprob.logprob == pytest.approx(float(plain[0, 17]), abs=1e-5)
    assert sampled[1].token_id == plain_sample(logits[1].tolist(), free, VOCAB)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(8, 6)
    draws = Sampler(VOCAB).sample(logits, [spec(SamplingParams(temperature=temperature, seed=s)) for s in range(8)])
    assert ids_of(draws) == logits.argmax(-1).tolist()


MATES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, seed=2, top_p=0.9, top_logprobs=3),
    SamplingParams(temperature=1.0, seed=3, top_k=5, frequency_penalty=0.5, logit_bias=((3, 2.0),)),
]
"""What else may be in the batch."""


@pytest.mark.parametrize("values", [[math.nan], [math.inf], [-math.inf] * VOCAB, [-math.inf, math.nan]])
@pytest.mark.parametrize("params", MATES)
@pytest.mark.parametrize("forced", [None, 7])
def test_logits_that_are_not_finite_fail_their_own_draw(
    values: list[float], params: SamplingParams, forced: int | None
) -> None:
    """The batch's other draws are those that are made without it, logprobs included. Forcing an id makes no good KV."""
    logits = random_logits(5, 1)
    others = [spec(one, key=row, output=[row] * row) for row, one in enumerate(MATES)]
    expected = made(Sampler(VOCAB).sample(torch.cat((logits[:2], logits[3:])), others))
    logits[2, VOCAB - len(values) :] = torch.tensor(values)
    specs = [*others[:2], spec(params, key=9, output=[4], forced=forced), *others[2:]]
    draws = Sampler(VOCAB).sample(logits, specs)
    assert draws.pop(2) == FailedDraw(DrawFailure.NOT_FINITE)
    assert draws == expected


@pytest.mark.parametrize(
    "hopeless",
    [
        spec(SamplingParams(), banned=tuple(range(VOCAB))),
        spec(SamplingParams(temperature=0.0), banned=tuple(range(VOCAB))),
        spec(SamplingParams(temperature=0.0, repetition_penalty=1e-45), prompt=range(VOCAB)),
    ],
    ids=["all banned", "all banned, greedy", "over the largest number"],
)
def test_settings_that_leave_no_token_fail_their_own_draw(hopeless: SampleSpec) -> None:
    logits = random_logits(3, 1)
    first, last = spec(MATES[3], key=1), spec(MATES[2], key=2)
    expected = made(Sampler(VOCAB).sample(logits[[0, 2]], [first, last]))
    draws = Sampler(VOCAB).sample(logits, [first, hopeless, last])
    assert draws == [expected[0], FailedDraw(DrawFailure.NOTHING_LEFT), expected[1]]


def test_wrong_shapes_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[1, 39\]; expected fp32 \[1, 40\]"):
        Sampler(VOCAB).sample(torch.zeros(1, 39), [spec(SamplingParams())])
    with pytest.raises(ValueError, match="bfloat16"):
        Sampler(VOCAB).sample(torch.zeros(1, VOCAB, dtype=torch.bfloat16), [spec(SamplingParams())])
    with pytest.raises(ValueError, match="num_tokens is 41; expected 1 to vocab_size, 40"):
        Sampler(VOCAB, num_tokens=41)
    assert Sampler(VOCAB).sample(torch.zeros(0, VOCAB), []) == []
