"""What the scheduler and the cache themselves cost: no model, a runner that answers at once and is not timed."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from sapwood_bench.machine import this_machine
from sapwood_bench.report import Figure, Report, publish
from sapwood_server.cache.manager import KVCacheManager
from sapwood_server.cache.tokens import pack_tokens
from sapwood_server.engine.scheduler import Scheduler, SchedulerLimits
from sapwood_server.values.plan import Sampled, StepPlan, StepResult
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams

_VOCAB_SIZE = 50_000
_PAGE_SIZE = 16
_STEP_TARGET_MS = 1.0
_MATCH_TARGET_MS = 5.0
_COMPLETION_TOKENS = 1000
"""So many that no request ends while steps are timed."""


@dataclass(frozen=True)
class _Tokens:
    token_bytes: Sequence[bytes] = field(default=(b" token",) * _VOCAB_SIZE)
    eos_ids: frozenset[int] = frozenset({2})


@dataclass(frozen=True)
class _Load:
    """Requests of unrelated random prompts that generate, and others that wait for room."""

    running: int
    waiting: int
    context: int
    steps: int
    """Steps there is room for."""

    @property
    def growth_pages(self) -> int:
        """Pages that the running sequences need on top of their prompts' to generate a token in each step."""
        return self.running * (self.steps // _PAGE_SIZE + 2)

    def scheduler(self, rng: random.Random) -> Scheduler:
        """With all requests added, and the running ones prefilled: each generates a token in every step."""
        long_prompt = (self.growth_pages + 1) * _PAGE_SIZE  # never fits beside what runs
        limits = SchedulerLimits(
            num_pages=1 + self.running * -(-self.context // _PAGE_SIZE) + self.growth_pages,
            page_size=_PAGE_SIZE,
            max_num_seqs=self.running + self.waiting,
            max_batched_tokens=self.running * self.context,  # all are prefilled in one step
            max_model_len=self.context + long_prompt + _COMPLETION_TOKENS,
        )
        scheduler = Scheduler(limits, _Tokens())
        prompts = [_ids(self.context, rng) for _ in range(self.running)]
        for index, prompt in enumerate(prompts):
            scheduler.add(_request(f"running {index}", prompt))
        while scheduler.stats().generation_tokens < self.running or scheduler.stats().requests_waiting:
            _step(scheduler, rng)
        rest = _ids(long_prompt, rng)
        for index in range(self.waiting):
            # A hit on a running prompt, and then tokens that nobody shares: compared in every step, never admitted.
            scheduler.add(_request(f"waiting {index}", (*prompts[index % self.running], index, *rest)))
        return scheduler


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("overhead")(overhead)


def overhead(
    sequences: Annotated[int, typer.Option(help="Running sequences; as many wait in the second figure.")] = 256,
    context: Annotated[int, typer.Option(help="Tokens of each.")] = 2000,
    match: Annotated[int, typer.Option(help="Tokens of the prefix to match.")] = 100_000,
    steps: Annotated[int, typer.Option(help="Steps timed.")] = 100,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Milliseconds of scheduler and cache per step, and per match of a long prefix."""
    machine = this_machine()
    rng = random.Random(7)
    busy = _time_steps(_Load(sequences, 0, context, steps), rng)
    crowded = _time_steps(_Load(sequences, sequences, context, steps), rng)
    figures = (
        *_figures(f"step, {sequences} running", busy, _STEP_TARGET_MS),
        *_figures(f"step, {sequences} running, {sequences} waiting", crowded, _STEP_TARGET_MS),
        *_figures(f"match of {match} tokens", _time_matches(match, rng), _MATCH_TARGET_MS),
    )
    settings: dict[str, object] = {
        "sequences": sequences,
        "context": context,
        "match": match,
        "steps": steps,
        "page size": _PAGE_SIZE,
    }
    publish(Report(bench="overhead", machine=machine, settings=settings, figures=figures), as_json=json)


def _figures(name: str, milliseconds: list[float], target: float) -> tuple[Figure, Figure]:
    return (
        Figure(name=f"{name}, median", value=statistics.median(milliseconds), unit="ms", at_most=target),
        Figure(name=f"{name}, fastest", value=min(milliseconds), unit="ms"),
    )


def _time_steps(load: _Load, rng: random.Random) -> list[float]:
    """Milliseconds per step: plan, commit, events and stats."""
    scheduler = load.scheduler(rng)
    gc.collect()
    times = [_step(scheduler, rng) for _ in range(load.steps)]
    stats = scheduler.stats()
    if stats.preemptions or stats.requests_running != load.running:
        raise RuntimeError(f"not the load that was to be timed: {stats}")
    return times


def _step(scheduler: Scheduler, rng: random.Random) -> float:
    """Milliseconds of one step without the runner's part."""
    started = time.perf_counter()
    plan = scheduler.schedule()
    planned = time.perf_counter() - started
    if plan is None:
        raise RuntimeError("the scheduler has nothing to do")
    result = _draw(plan, rng)
    started = time.perf_counter()
    scheduler.commit(plan, result)
    scheduler.take_events()
    scheduler.stats()
    return (planned + time.perf_counter() - started) * 1e3


def _request(name: str, prompt: tuple[int, ...]) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=_COMPLETION_TOKENS, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)


def _draw(plan: StepPlan, rng: random.Random) -> StepResult:
    return StepResult(
        samples=tuple(tuple(Sampled(rng.randrange(3, _VOCAB_SIZE)) for _ in row.samples) for row in plan.rows)
    )


def _time_matches(num_tokens: int, rng: random.Random, rounds: int = 50) -> list[float]:
    """Milliseconds to find that all of a resident prompt is resident."""
    cache = KVCacheManager(2 + num_tokens // _PAGE_SIZE + 1, _PAGE_SIZE)
    packed = pack_tokens(_ids(num_tokens, rng))
    table = cache.admit("", packed, cache.match("", packed, num_tokens)).table
    cache.extend(table, num_tokens)
    cache.publish(table, num_tokens)
    cache.release(table)

    def match() -> None:
        found = cache.match("", packed, num_tokens - 1).num_tokens
        if found != num_tokens - 1:
            raise RuntimeError(f"{found} tokens matched of {num_tokens}")

    return [_timed(match) for _ in range(rounds)]


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def _ids(length: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choices(range(3, _VOCAB_SIZE), k=length))


if __name__ == "__main__":
    typer.run(overhead)
