"""The runner by the Triton kernels, in the interpreter: what a step plan asks for, and what comes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sapwood_server.engine.scheduler import Scheduler, SchedulerLimits
from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.vocabulary import load_vocabulary
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.device_runner import RandomModel, make_random_runner
from sapwood_server.model.device_step import DeviceLimits
from sapwood_server.model.devices import DeviceChoice, DeviceKind
from sapwood_server.model.load import load_runner
from sapwood_server.model.runner import ModelRunner
from sapwood_server.model.warm_up import warm_up
from sapwood_server.values.events import FinalEvent
from sapwood_server.values.plan import FailedDraw, PageCopy, Phase, SampleSpec, StepPlan
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams
from support.device_runners import FEW_HEADS, device_config, make_device_model, make_device_runner
from support.draws import ids_of, made
from support.stepping import Driver, make_config, make_runner, sample_spec

PROMPT = [5, 90, 33, 7, 200, 41, 41, 12, 99, 150, 3, 77, 8, 9, 10, 11, 12, 13]
INTERPRETER = DeviceChoice(kind=DeviceKind.INTERPRETER, detail="", reason="")


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_device_model(tmp_path_factory.mktemp("runner") / "model", overrides=FEW_HEADS)


@pytest.fixture(name="expected", scope="module")
def expected_fixture(folder: Path) -> list[int]:
    """The CPU runner's greedy ids after PROMPT."""
    return Driver(make_runner(make_config(folder))).generate(PROMPT, 4, chunk=64)


@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_ids_are_the_cpu_runners(folder: Path, expected: list[int], graphs: bool) -> None:
    runner = make_device_runner(folder, graphs=graphs, max_num_seqs=1)
    runner.capture_graphs()
    assert Driver(runner).generate(PROMPT, 4, chunk=7) == expected


def test_samples_come_back_in_the_plans_order(folder: Path, expected: list[int]) -> None:
    """Rows are computed in another order: decode rows first. Some have several samples, some none; the logprobs are
    those of the CPU's runner."""
    driver, reference = Driver(make_device_runner(folder)), Driver(make_runner(make_config(folder)))
    asked = SamplingParams(temperature=0.0, top_logprobs=2)
    found = []
    for one in (driver, reference):
        decoding, twice, silent = (one.sequence() for _ in range(3))
        one.logits([decoding.row(PROMPT, Phase.PREFILL)])
        rows = [
            twice.row(PROMPT[:5], Phase.PREFILL, (sample_spec(asked), sample_spec(choice_key=1))),
            decoding.row(expected[:1], Phase.DECODE, (sample_spec(asked, choice_key=2),)),
            silent.row(PROMPT[:3], Phase.PREFILL),
        ]
        found.append(one.runner.execute(one.plan(rows)))
    for mine, theirs in zip(found[0].samples, found[1].samples, strict=True):
        assert ids_of(mine) == ids_of(theirs)
        for draw, other in zip(made(mine), made(theirs), strict=True):
            assert (draw.logprob is None) == (other.logprob is None)
            if draw.logprob is not None and other.logprob is not None:
                assert draw.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
                assert [id_ for id_, _ in draw.logprob.top] == [id_ for id_, _ in other.logprob.top]
    assert ids_of(found[0].samples[1]) == expected[1:2]
    assert found[0].forward_seconds > 0
    assert found[0].sample_seconds > 0


def test_more_choices_than_sequences_may_run(folder: Path) -> None:
    """They are drawn in turns, and each draws what it draws alone."""
    runner = make_device_runner(folder, max_num_seqs=2)
    specs = [
        SampleSpec(choice_key=c, choice=c, sampling=SamplingParams(seed=3), prompt_ids=(), output_ids=())
        for c in range(5)
    ]
    found = []
    for samples in (tuple(specs), *((spec,) for spec in specs)):
        driver = Driver(runner)
        row = driver.sequence().row(PROMPT[:4], Phase.PREFILL, samples)
        found.append(ids_of(runner.execute(driver.plan([row])).samples[0]))
        runner.execute(StepPlan(step=0, rows=(), released=(1,)))
    assert found[0] == [one for alone in found[1:] for one in alone]
    assert len(set(found[0])) > 1


def test_a_damaged_row_fails_alone(folder: Path, expected: list[int]) -> None:
    """NaN in a page is the trouble of the sequence that has it."""
    runner = make_device_runner(folder)
    driver = Driver(runner)
    damaged, sound = driver.sequence(), driver.sequence()
    driver.logits([damaged.row(PROMPT[:4], Phase.PREFILL), sound.row(PROMPT, Phase.PREFILL)])
    runner.kv_pages(damaged.pages[0])[:, :, :, 1] = float("nan")
    rows = [sequence.row(expected[:1], Phase.DECODE, (sample_spec(),)) for sequence in (damaged, sound)]
    first, second = runner.execute(driver.plan(rows)).samples
    assert isinstance(first[0], FailedDraw)
    assert ids_of(second) == expected[1:2]


def test_a_step_without_rows_still_copies(folder: Path) -> None:
    driver = Driver(make_device_runner(folder))
    sequence = driver.sequence()
    (wanted,) = driver.logits([sequence.row(PROMPT, Phase.PREFILL)])
    copies = [PageCopy(sequence.pages[0], driver.free_pages.pop(), 16)]
    assert driver.runner.execute(driver.plan([], copies)).samples == ()
    twin = driver.sequence()
    twin.adopt([copies[0].target], 16)
    assert torch.allclose(driver.logits([twin.row(PROMPT[16:], Phase.PREFILL)])[0], wanted[16:], atol=1e-5)


def test_a_failed_step_leaves_a_runner_that_works(folder: Path, expected: list[int]) -> None:
    driver = Driver(make_device_runner(folder, max_batched_tokens=32))
    with pytest.raises(ValueError, match=r"accepted: torch\.int64, at most"):
        driver.logits([driver.sequence().row([*PROMPT, *PROMPT], Phase.PREFILL)])
    assert driver.generate(PROMPT, 2, chunk=32) == expected[:2]


def served(
    runner: ModelRunner, folder: Path, prompts: Sequence[Sequence[int]], num_pages: int
) -> tuple[list[list[int]], int]:
    """The ids of requests that are sent together, and how often one was preempted.

    Each time a new scheduler, which counts its sequences anew: those of the one before are released first.
    """
    runner.execute(StepPlan(step=0, rows=(), released=tuple(range(100))))
    limits = SchedulerLimits(
        num_pages=num_pages, page_size=16, max_num_seqs=2, max_batched_tokens=32, max_model_len=128
    )
    scheduler = Scheduler(limits, load_vocabulary(resolve_model(str(folder))))
    sampling = SamplingParams(temperature=0.0, max_tokens=19, ignore_eos=True)
    ids: dict[str, list[int]] = {}
    preemptions = 0
    for index, prompt in enumerate(prompts):
        ids[str(index)] = []
        scheduler.add(Request(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling))
    while (step := scheduler.schedule()) is not None:
        scheduler.commit(step, runner.execute(step))
        scheduler.check()
        for event in scheduler.take_events():
            if isinstance(event, FinalEvent):
                assert event.error is None
                preemptions += event.usage.preemptions
            else:
                ids[event.request_id] += event.token_ids
    return list(ids.values()), preemptions


def test_preempted_requests_answer_as_they_do_alone(tmp_path: Path) -> None:
    """Two requests of three pages in a pool of four: the scheduler's own plans, deterministic, with graphs."""
    folder = make_device_model(tmp_path / "model", overrides={**FEW_HEADS, "num_hidden_layers": 1})
    prompts = [[30 + i, *PROMPT[:14]] for i in range(2)]
    runner = make_device_runner(folder, graphs=True, deterministic=True, max_num_seqs=2)
    runner.capture_graphs()
    alone = [served(runner, folder, [prompt], 10)[0][0] for prompt in prompts]
    together, preemptions = served(runner, folder, prompts, 5)
    assert together == alone
    assert preemptions > 0


def test_a_whole_start_in_the_interpreter(folder: Path, expected: list[int]) -> None:
    runner = load_runner(device_config(folder, max_batched_tokens=8), lambda stage, fraction: None)
    assert (runner.info.device, runner.info.dtype) == ("interpreter", "float32")
    assert not runner.kv_pages(0).any()
    assert Driver(runner).generate(PROMPT, 2, chunk=8) == expected[:2]


def test_a_shape_without_files_can_be_measured(folder: Path) -> None:
    """Random weights of a model's shape: warmed up, a chunk and a decode step run and give finite logits."""
    config = dataclasses.replace(load_model_config(resolve_model(str(folder))), num_layers=1)
    limits = DeviceLimits(num_tokens=8, num_sequences=2, max_model_len=64, page_size=16, num_pages=9)
    random = RandomModel(config=config, device=INTERPRETER, dtype=torch.float32, limits=limits)
    runner = make_random_runner(random)
    warm_up(runner)
    runner.capture_graphs()
    driver = Driver(runner)
    sequence = driver.sequence()
    (chunk,) = driver.logits([sequence.row(PROMPT[:4], Phase.PREFILL)])
    spread = float(chunk.std())
    assert 0.1 < spread < 10
    spec = SampleSpec(choice_key=1, choice=0, sampling=SamplingParams(), prompt_ids=(), output_ids=())
    (drawn,) = runner.execute(driver.plan([sequence.row([9], Phase.DECODE, (spec,))])).samples
    assert 0 <= ids_of(drawn)[0] < config.vocab_size
    with pytest.raises(StartupError, match="head_dim 72"):
        make_random_runner(dataclasses.replace(random, config=dataclasses.replace(config, head_dim=72)))
