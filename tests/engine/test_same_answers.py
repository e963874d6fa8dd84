"""Promise 2 in fp32: what a request answers does not depend on the cache, on chunks, on batch mates or on preemption.

The real scheduler drives the real runner on the demo model; only the process and the socket are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sapwood_server.engine.scheduler import Scheduler, SchedulerLimits
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.vocabulary import Vocabulary, load_vocabulary
from sapwood_server.model import load
from sapwood_server.model.load_plan import LoadPlan, plan_load
from sapwood_server.model.loaded_model import Model
from sapwood_server.model.runner import ModelRunner
from sapwood_server.values.demo import DEMO_MODEL
from sapwood_server.values.events import FinalEvent, Usage
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams
from support.scale import scaled
from support.stepping import make_config
from support.texts import essay_ids

NUM_PROMPTS = scaled(12, 3)
NUM_TOKENS = 40
PAGE_SIZE = 16
ROOMY = 400
"""Pages that hold every request at once."""


@dataclass(frozen=True)
class Served:
    """What came of one request."""

    ids: tuple[int, ...]
    usage: Usage


@dataclass(frozen=True)
class Bench:
    """A loaded model, from which every case gets a runner and a scheduler of its own."""

    plan: LoadPlan
    model: Model
    vocabulary: Vocabulary

    def serve(self, rounds: Sequence[Sequence[Sequence[int]]], limits: SchedulerLimits) -> list[Served]:
        """The prompts of each round are sent together, the next round once they have ended."""
        kv = dataclasses.replace(self.plan.kv, num_pages=limits.num_pages)
        runner: ModelRunner = load.make_runner(dataclasses.replace(self.plan, kv=kv), self.model)
        scheduler = Scheduler(limits, self.vocabulary)
        ids: dict[str, list[int]] = {}
        usages: dict[str, Usage] = {}
        for prompts in rounds:
            for prompt in prompts:
                name = f"r{len(ids)}"
                ids[name] = []
                scheduler.add(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=SAMPLING))
            while (step := scheduler.schedule()) is not None:
                scheduler.commit(step, runner.execute(step))
                scheduler.check()
                for event in scheduler.take_events():
                    if isinstance(event, FinalEvent):
                        assert event.error is None
                        usages[event.request_id] = event.usage
                    else:
                        ids[event.request_id] += event.token_ids
        return [Served(tuple(ids[name]), usages[name]) for name in ids]


SAMPLING = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def limits(
    *, num_pages: int = ROOMY, max_num_seqs: int = 64, chunk: int = 256, prefix_cache: bool = True
) -> SchedulerLimits:
    """Those of one case."""
    return SchedulerLimits(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=chunk,
        max_model_len=8192,
        prefix_cache=prefix_cache,
    )


def make_prompts() -> list[list[int]]:
    """Pieces of a text; every second one begins with most of the one before it."""
    essay = essay_ids()
    prompts: list[list[int]] = []
    for index in range(NUM_PROMPTS):
        length = 20 + index * 53 % 140
        body = essay[index * 180 : index * 180 + length]
        prompts.append([*prompts[-1][: len(prompts[-1]) - 5], *body[:40]] if index % 2 else body)
    return prompts


PROMPTS = make_prompts()


@pytest.fixture(scope="module")
def bench() -> Bench:
    plan = plan_load(make_config(DEMO_MODEL, kv_memory="512MiB"))
    assert plan.dtype.name == "float32"
    return Bench(plan, load.load_model(plan, lambda stage, fraction: None), load_vocabulary(resolve_model(DEMO_MODEL)))


@pytest.fixture(scope="module")
def alone(bench: Bench) -> list[tuple[int, ...]]:
    """Each prompt by itself, without a cache, in one chunk: what all other cases must equal."""
    return ids_of(bench.serve([[prompt] for prompt in PROMPTS], limits(prefix_cache=False)))


def ids_of(served: Sequence[Served]) -> list[tuple[int, ...]]:
    return [one.ids for one in served]


def test_with_a_cache_cold_and_warm(bench: Bench, alone: list[tuple[int, ...]]) -> None:
    served = bench.serve([[prompt] for prompt in (*PROMPTS, *PROMPTS)], limits())
    assert ids_of(served) == [*alone, *alone]
    cached = [one.usage.cached_tokens for one in served]
    assert sum(cached[: len(PROMPTS)]) > 0, "prompts that share a prefix share it"
    assert cached[len(PROMPTS) :] == [len(prompt) - 1 for prompt in PROMPTS]


def test_a_second_turn_is_the_same_warm_and_cold(bench: Bench, alone: list[tuple[int, ...]]) -> None:
    """The reply's KV was written by decode steps; cold, the same tokens go through prefill."""
    turns = [[*prompt, *reply, *prompt[:9]] for prompt, reply in zip(PROMPTS, alone, strict=True)]
    cold = bench.serve([[turn] for turn in turns], limits(prefix_cache=False))
    warm = bench.serve([PROMPTS, *([turn] for turn in turns)], limits())[len(PROMPTS) :]
    assert ids_of(warm) == ids_of(cold)
    least = [len(prompt) + NUM_TOKENS - 1 for prompt in PROMPTS]
    assert all(one.usage.cached_tokens >= count for one, count in zip(warm, least, strict=True))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_in_one_batch(bench: Bench, alone: list[tuple[int, ...]], prefix_cache: bool) -> None:
    assert ids_of(bench.serve([PROMPTS], limits(prefix_cache=prefix_cache))) == alone


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_in_chunks(bench: Bench, alone: list[tuple[int, ...]], chunk: int) -> None:
    assert ids_of(bench.serve([[prompt] for prompt in PROMPTS], limits(chunk=chunk))) == alone


def scarce(prompts: Sequence[Sequence[int]]) -> int:
    """Pages for the prompts and one more each, where replies need two or three: some sequence has to go."""
    return 1 + sum(-(-len(prompt) // PAGE_SIZE) + 1 for prompt in prompts)


@pytest.mark.parametrize("chunk", [7, 64])
def test_preempted(bench: Bench, alone: list[tuple[int, ...]], chunk: int) -> None:
    served = bench.serve([PROMPTS], limits(num_pages=scarce(PROMPTS[:3]), chunk=chunk, prefix_cache=False))
    assert ids_of(served) == alone
    assert sum(one.usage.preemptions for one in served) > 0
    assert sum(one.usage.recomputed_tokens for one in served) > 0


def test_preempted_with_a_cache(bench: Bench, alone: list[tuple[int, ...]]) -> None:
    """Prompts that share nothing, so that the same room is as scarce."""
    prompts, expected = PROMPTS[::2], alone[::2]
    served = bench.serve([prompts], limits(num_pages=scarce(prompts[:2]), chunk=64))
    assert ids_of(served) == expected
    assert sum(one.usage.preemptions for one in served) > 0
