"""`--deterministic`: every logit has the same bits, whatever the schedule. The real scheduler drives the real runner.

Requests are first served one by one, cold, each prompt in one chunk. Then they come in random schedules: any chunk
size, batch mates, prefix hits (on prompts, and on replies that decode wrote), preemption. Logits are a function of the
tokens before them, so each row that a sampler sees is compared with the first one that had the same tokens.
"""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sapwood_server.config import ServerConfig
from sapwood_server.engine.scheduler import Scheduler, SchedulerLimits
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.vocabulary import Vocabulary, load_vocabulary
from sapwood_server.model import load
from sapwood_server.model.load_plan import LoadPlan, plan_load
from sapwood_server.model.loaded_model import Model
from sapwood_server.model.runner import TokenSampler
from sapwood_server.values.demo import DEMO_MODEL
from sapwood_server.values.events import FinalEvent, Usage
from sapwood_server.values.plan import Draw, SampleSpec
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams
from support.scale import scaled
from support.source import ROOT
from support.texts import essay_ids
from support.tiny_models import make_tiny_model

DTYPES = ("float32", "bfloat16")
NUM_SCHEDULES = scaled(100, 6)
"""In each dtype, with each number of threads."""
NUM_DEMO_SCHEDULES = scaled(20, 1)
PAGE_SIZE = 16
ROOMY = 400
"""Pages that hold every request at once."""
MIDDLING = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""A tiny model whose products are large enough for this torch to sum them in several ways."""


class Witness:
    """A sampler that compares the logits it is given."""

    def __init__(self, sampler: TokenSampler, seen: dict[tuple[int, ...], Tensor]) -> None:
        self.num_compared = 0
        self.differing: list[int] = []
        """Numbers of tokens before a row that has other bits than the first one."""
        self._sampler = sampler
        self._seen = seen

    def sample(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[Draw]:
        for row, spec in zip(logits, specs, strict=True):
            before = (*spec.prompt_ids, *spec.output_ids)
            first = self._seen.setdefault(before, row.clone())
            self.num_compared += 1
            if not torch.equal(first.view(torch.int32), row.view(torch.int32)):
                self.differing.append(len(before))
        return self._sampler.sample(logits, specs)

    def drop(self, choice_keys: Iterable[int]) -> None:
        self._sampler.drop(choice_keys)


@dataclass
class Outcome:
    """What came of one schedule."""

    witness: Witness
    ids: dict[str, list[int]] = field(default_factory=dict)
    usages: dict[str, Usage] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """A loaded model, from which every schedule gets a runner and a scheduler of its own; logits seen so far."""

    plan: LoadPlan
    model: Model
    vocabulary: Vocabulary
    seen: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def serve(self, arrivals: Sequence[tuple[int, Request]], limits: SchedulerLimits) -> Outcome:
        """The requests, each in the step that it is given with (or later, when nothing else is left to do)."""
        kv = dataclasses.replace(self.plan.kv, num_pages=limits.num_pages)
        runner = load.make_runner(dataclasses.replace(self.plan, kv=kv), self.model)
        outcome = Outcome(Witness(runner._sampler, self.seen))
        runner._sampler = outcome.witness
        scheduler = Scheduler(limits, self.vocabulary)
        waiting = list(arrivals)
        number = 0
        while waiting or scheduler.has_unfinished:
            while waiting and (waiting[0][0] <= number or not scheduler.has_unfinished):
                scheduler.add(waiting.pop(0)[1])
            step = scheduler.schedule()
            assert step is not None
            scheduler.commit(step, runner.execute(step))
            number += 1
            for event in scheduler.take_events():
                if isinstance(event, FinalEvent):
                    assert event.error is None
                    outcome.usages[event.request_id] = event.usage
                else:
                    outcome.ids.setdefault(f"{event.request_id}.{event.choice}", []).extend(event.token_ids)
        return outcome

    def alone(self, request: Request) -> Outcome:
        """Cold, in one chunk, without a cache."""
        return self.serve([(0, request)], make_limits(prefix_cache=False))


def make_limits(
    *, num_pages: int = ROOMY, max_num_seqs: int = 16, chunk: int = 4096, prefix_cache: bool = True
) -> SchedulerLimits:
    return SchedulerLimits(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=chunk,
        max_model_len=1024,
        prefix_cache=prefix_cache,
    )


def make_bench(model: Path | str, dtype: str) -> Bench:
    """Without the start's own check, which would refuse what is broken here on purpose."""
    plan = plan_load(ServerConfig(model=str(model), dtype=dtype, kv_memory="64MiB", deterministic=True))
    return Bench(plan, load.load_model(plan, lambda stage, fraction: None), load_vocabulary(resolve_model(str(model))))


def first_turns(ids: Sequence[int], lengths: Sequence[int], reply: int) -> list[Request]:
    """Prompts of about these lengths; every second one begins as the one before it does. Replies of `reply` tokens and
    more, greedy or drawn; one request has two choices."""
    requests: list[Request] = []
    for index, length in enumerate(lengths):
        prompt = list(ids[index * 60 : index * 60 + length])
        if index % 2:
            before = requests[-1].prompt_token_ids
            prompt = [*before[: len(before) * 3 // 4], *prompt[:30]]
        sampling = SamplingParams(
            temperature=0.0 if index % 3 else 0.8,
            top_p=0.95,
            seed=index,
            max_tokens=reply + index * 3,
            ignore_eos=True,
            n=2 if index == 3 else 1,
        )
        requests.append(Request(request_id=f"a{index}", prompt_token_ids=tuple(prompt), sampling=sampling))
    return requests


def second_turn(request: Request, reply: Sequence[int]) -> Request:
    """The prompt, the reply and a little more: a cache hit on KV that decode wrote."""
    prompt = (*request.prompt_token_ids, *reply, *request.prompt_token_ids[:3])
    return Request(request_id=request.request_id.replace("a", "b"), prompt_token_ids=prompt, sampling=request.sampling)


def random_schedule(requests: Sequence[Request], seed: int) -> tuple[list[tuple[int, Request]], SchedulerLimits]:
    """A few of the requests, in random steps, under random limits; in a third of the schedules short ones that have to
    drive each other out of the pool."""
    draw = random.Random(seed)
    scarce = seed % 3 == 0
    chunk = draw.choice((1, 7, 64, draw.randint(2, 300), 4096))
    longest = 60 if scarce else 200 if chunk < 7 else 1000  # a long prompt, one token at a time, takes a second
    fitting = [request for request in requests if len(request.prompt_token_ids) < longest]
    chosen = draw.sample(fitting, min(len(fitting), 5 if scarce else draw.randint(2, 4)))
    arrivals = sorted((draw.randint(0, 3 if scarce else 12), request.request_id, request) for request in chosen)
    limits = make_limits(
        num_pages=scarce_pages(chosen) if scarce else ROOMY,
        max_num_seqs=draw.randint(3 if scarce else 1, 8),
        chunk=chunk,
        prefix_cache=draw.random() < 0.8,
    )
    return [(step, request) for step, _, request in arrivals], limits


def scarce_pages(requests: Sequence[Request]) -> int:
    """Pages for three prompts and a little of their replies, or for the longest request alone."""
    prompts = sorted(-(-len(request.prompt_token_ids) // PAGE_SIZE) for request in requests)
    wholes = [len(request.prompt_token_ids) + (request.sampling.max_tokens or 0) for request in requests]
    return 1 + max(sum(prompts[:3]) + 1, -(-max(wholes) // PAGE_SIZE))


def check_schedules(bench: Bench, first: Sequence[Request], seeds: range) -> list[Usage]:
    """Every schedule gives every row the bits that it had when its request was alone."""
    cold = [bench.alone(request) for request in first]
    second = [
        second_turn(request, one.ids[f"{request.request_id}.0"]) for request, one in zip(first, cold, strict=True)
    ]
    alone = dict(pair for one in (*cold, *map(bench.alone, second)) for pair in one.ids.items())
    usages: list[Usage] = []
    for seed in seeds:
        outcome = bench.serve(*random_schedule([*first, *second], seed))
        assert outcome.witness.differing == [], f"schedule {seed}"
        assert outcome.witness.num_compared >= sum(map(len, outcome.ids.values()))
        assert {name: alone[name] for name in outcome.ids} == outcome.ids, f"schedule {seed}"
        usages += outcome.usages.values()
    return usages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with norms of heads for one dtype, and one with biases for the other."""
    path = tmp_path_factory.mktemp("deterministic")
    return {
        dtype: make_tiny_model(path / name, name, max_position_embeddings=1024, overrides=MIDDLING)
        for dtype, name in {"float32": "qwen3", "bfloat16": "qwen2"}.items()
    }


def tiny_requests() -> list[Request]:
    """One prompt is longer than a tile of keys."""
    ids = [3 + (17 * position * position + 5 * position) % 250 for position in range(1100)]
    return first_turns(ids, (3, 40, 17, 33, 100, 61, 540, 130), reply=24)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_schedules(folders: dict[str, Path], dtype: str) -> None:
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])
    usages = check_schedules(make_bench(folders[dtype], dtype), tiny_requests(), range(NUM_SCHEDULES))
    assert sum(usage.cached_tokens for usage in usages) > 0
    assert sum(usage.preemptions for usage in usages) > 0


@pytest.mark.timeout(1200)
def test_random_schedules_with_two_threads() -> None:
    """The same in a process of its own, for OpenMP reads its variables when it is loaded. (A thread that waits gives up
    its core: spinning beside the suite's other worker makes a step ten times as long.)"""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_random_schedules"]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(DTYPES)} passed" in done.stdout


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_schedules_of_a_real_model(dtype: str) -> None:
    lengths = (13, 40, 530)[: scaled(3, 2)]
    check_schedules(
        make_bench(DEMO_MODEL, dtype), first_turns(essay_ids(), lengths, reply=4), range(NUM_DEMO_SCHEDULES)
    )


@pytest.mark.parametrize("broken", ["linears", "ops"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_part_that_is_not_is_noticed(folders: dict[str, Path], dtype: str, broken: str) -> None:
    """Linears of as many rows as there are, or the fast ops, turn the comparison red. (In bf16 most sums of so small a
    model round to the same number: the first eight schedules saw no difference.)"""
    bench = make_bench(folders[dtype], dtype)
    if broken == "linears":
        forms = dataclasses.replace(bench.model.forms, fixed_rows=False)
        bench = dataclasses.replace(bench, model=dataclasses.replace(bench.model, forms=forms))
    else:
        bench = dataclasses.replace(bench, plan=dataclasses.replace(bench.plan, deterministic=False))
    with pytest.raises(AssertionError, match="schedule"):
        check_schedules(bench, tiny_requests(), range(60))
