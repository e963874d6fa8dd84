"""Step plans: order, samples, releases, and plans that break their own rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sapwood_server.model.runner import ModelRunner
from sapwood_server.values.plan import PageCopy, Phase, RowPlan, SampleSpec, StepPlan
from sapwood_server.values.sampling import SamplingParams
from support.draws import ids_of, made
from support.stepping import Driver, make_config, make_runner, sample_spec
from support.tiny_models import PADDING_IDS, make_tiny_model
from support.tiny_oracle import oracle_logits

PROMPT = [5, 90, 33, 7, 200, 41, 41, 12, 99, 150, 3, 77, 8, 9, 10, 11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("runner") / "model", "qwen2")


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return make_runner(make_config(folder))


def test_greedy_ids_are_the_oracles(runner: ModelRunner, folder: Path) -> None:
    ids = Driver(runner).generate(PROMPT, 12, chunk=7)
    logits = oracle_logits(folder, PROMPT + ids)
    assert ids == logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()


def test_samples_come_back_in_the_plans_order(runner: ModelRunner) -> None:
    """Rows are computed in another order: decode rows first. Some rows have several samples, some none."""
    driver = Driver(runner)
    alone = [driver.generate(PROMPT[: 5 + i], 2, chunk=64) for i in range(4)]
    sequences = [driver.sequence() for _ in range(4)]
    driver.logits([sequences[1].row(PROMPT[:6], Phase.PREFILL), sequences[2].row(PROMPT[:4], Phase.PREFILL)])
    first = alone[1][0]
    rows = [
        sequences[0].row(PROMPT[:5], Phase.PREFILL, (sample_spec(), sample_spec(choice_key=1))),
        sequences[1].row([first], Phase.DECODE, (sample_spec(choice_key=2),)),
        sequences[2].row(PROMPT[4:6], Phase.PREFILL),
        sequences[3].row(PROMPT[:8], Phase.PREFILL, (sample_spec(choice_key=3),)),
    ]
    result = runner.execute(driver.plan(rows))
    found = [ids_of(samples) for samples in result.samples]
    assert found == [[alone[0][0]] * 2, [alone[1][1]], [], [alone[3][0]]]
    assert result.forward_seconds > 0
    assert result.sample_seconds > 0


def test_a_forced_id_keeps_the_models_logprob(runner: ModelRunner) -> None:
    """Over the ids that could be drawn: the vocabulary's padding is none."""
    driver = Driver(runner)
    sequence = driver.sequence()
    spec = SampleSpec(
        choice_key=1,
        choice=0,
        sampling=SamplingParams(temperature=0.0, top_logprobs=0),
        prompt_ids=PROMPT,
        output_ids=(),
        forced=77,
    )
    (draws,) = runner.execute(driver.plan([sequence.row(PROMPT, Phase.PREFILL, (spec,))])).samples
    (sampled,) = made(draws)
    real = driver.teacher_forced(PROMPT, 64)[-1][:-PADDING_IDS]
    wanted = torch.log_softmax(real, dim=-1)[77]
    assert sampled.token_id == 77
    assert sampled.logprob is not None
    assert abs(sampled.logprob.logprob - float(wanted)) < 1e-4


def test_a_step_without_rows_still_copies_and_releases(runner: ModelRunner) -> None:
    driver = Driver(runner)
    sequence = driver.sequence()
    wanted = driver.logits([sequence.row(PROMPT, Phase.PREFILL)])[0][16:]
    copies = [PageCopy(page, driver.free_pages.pop(), 16) for page in sequence.pages]
    driver.release(sequence)
    assert runner.execute(driver.plan([], copies)).samples == ()
    twin = driver.sequence()
    twin.adopt([copy.target for copy in copies], 16)
    assert torch.allclose(driver.logits([twin.row(PROMPT[16:], Phase.PREFILL)])[0], wanted, atol=1e-5)


def test_a_released_id_starts_with_an_empty_table(runner: ModelRunner) -> None:
    row = RowPlan(sequence_id=1, token_ids=PROMPT[:3], start=0, phase=Phase.PREFILL, new_pages=[4])
    runner.execute(StepPlan(step=0, rows=(row,)))
    again = RowPlan(sequence_id=1, token_ids=PROMPT[3:5], start=3, phase=Phase.PREFILL, new_pages=())
    with pytest.raises(ValueError, match="sequence 1 has 0 pages for 5 tokens"):
        runner.execute(StepPlan(step=1, rows=(again,), released=(1, 2)))


@pytest.mark.parametrize("page", [0, -1, 10**6])
def test_pages_that_do_not_exist_are_refused(runner: ModelRunner, page: int) -> None:
    row = RowPlan(sequence_id=1, token_ids=PROMPT[:3], start=0, phase=Phase.PREFILL, new_pages=[page])
    with pytest.raises(ValueError, match=f"page is {page}; accepted: 1 to"):
        runner.execute(StepPlan(step=0, rows=(row,)))


def test_a_decode_row_has_one_token(runner: ModelRunner) -> None:
    row = RowPlan(sequence_id=1, token_ids=[1, 2], start=0, phase=Phase.DECODE, new_pages=[1])
    with pytest.raises(ValueError, match="a decode row has 2 tokens; accepted: 1"):
        runner.execute(StepPlan(step=0, rows=(row,)))


def test_a_failed_step_leaves_a_runner_that_works(runner: ModelRunner) -> None:
    driver = Driver(runner)
    wanted = driver.generate(PROMPT, 4, chunk=64)
    bad = RowPlan(sequence_id=50, token_ids=PROMPT, start=0, phase=Phase.PREFILL, new_pages=[1, 0])
    with pytest.raises(ValueError, match="page is 0"):
        runner.execute(StepPlan(step=0, rows=(bad,)))
    runner.execute(StepPlan(step=1, rows=(), released=(50,)))
    assert driver.generate(PROMPT, 4, chunk=64) == wanted


def test_page_0_is_never_written(runner: ModelRunner) -> None:
    driver = Driver(runner)
    driver.generate(PROMPT, 30, chunk=3)
    assert not runner.kv_pages(0).any()
    assert runner.kv_pages(driver.free_pages[-1]).any()


def test_every_token_is_in_its_page_when_the_step_ends(runner: ModelRunner) -> None:
    """Decoded tokens too, whose step reads a dense copy: another sequence may share the page in the next step."""
    driver = Driver(runner)
    by_decode, by_prefill = driver.sequence(), driver.sequence()
    driver.logits([by_decode.row(PROMPT[:4], Phase.PREFILL), by_prefill.row(PROMPT, Phase.PREFILL)])
    for token_id in PROMPT[4:]:
        driver.logits([by_decode.row([token_id], Phase.DECODE)])
    for mine, theirs in zip(by_decode.pages, by_prefill.pages, strict=True):
        assert torch.allclose(runner.kv_pages(mine), runner.kv_pages(theirs), atol=1e-5)
