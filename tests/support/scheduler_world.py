"""The real scheduler and cache around a `DigestRunner`, with every promise checked as it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sapwood_server.engine.limits import SchedulerLimits, completion_budget
from sapwood_server.engine.scheduler import Scheduler
from sapwood_server.engine.sequence import SequenceState
from sapwood_server.values.events import FinalEvent, FinishReason, TokenEvent, Usage
from sapwood_server.values.plan import DrawFailure, FailedDraw, StepPlan, StepResult
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams
from support.digest_kv import DigestRunner, ToyTokens, WatchedCache, expected_choice


def make_limits(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 64,
    max_model_len: int = 1000,
    prefix_cache: bool = True,
) -> SchedulerLimits:
    """Small ones; `num_pages` without the reserved page."""
    return SchedulerLimits(
        num_pages=num_pages + 1,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_model_len=max_model_len,
        prefix_cache=prefix_cache,
    )


@dataclass
class Story:
    """What has happened to one request."""

    request: Request
    events: list[TokenEvent] = field(default_factory=list)
    final: FinalEvent | None = None
    cached_tokens: int | None = None
    """What the oracle said at its first admission."""
    cancelled: bool = False

    def ids(self, choice: int) -> tuple[int, ...]:
        return tuple(t for event in self.events if event.choice == choice for t in event.token_ids)

    @property
    def usage(self) -> Usage:
        assert self.final is not None, f"{self.request.request_id} has not ended"
        return self.final.usage

    def text(self, choice: int) -> bytes:
        return b"".join(event.data for event in self.events if event.choice == choice)

    def finish_reasons(self, choice: int) -> list[FinishReason]:
        return [e.finish_reason for e in self.events if e.choice == choice and e.finish_reason is not None]


class World:
    """Submit, step, cancel; `check()` of scheduler and cache runs after every operation."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.cache = WatchedCache(limits.num_pages, limits.page_size, limits.prefix_cache)
        self.now = 0.0
        self.tokens = ToyTokens()
        self.scheduler = Scheduler(limits, self.tokens, clock=lambda: self.now, cache=self.cache)
        self.runner = DigestRunner(self.cache.kv, self._tokens_of)
        self.stories: dict[str, Story] = {}
        self.failed: set[str] = set()

    # Operations

    def submit(self, request: Request) -> Story:
        story = self.stories[request.request_id] = Story(request)
        self.scheduler.add(request)
        self._check()
        return story

    def ask(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        forced: Sequence[Sequence[int]] = (),
        salt: str = "",
        priority: int = 0,
    ) -> Story:
        """Submit a request with a fresh id; two tokens, whatever they are, unless `sampling` is given."""
        request = Request(
            request_id=f"r{len(self.stories)}",
            prompt_token_ids=tuple(prompt),
            sampling=sampling or length(2),
            salt=salt,
            priority=priority,
            forced_tokens=tuple(tuple(ids) for ids in forced),
        )
        return self.submit(request)

    def cancel(self, request_id: str) -> None:
        story = self.stories[request_id]
        story.cancelled = story.cancelled or story.final is None
        self.scheduler.cancel(request_id)
        self._check()

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> StepPlan | None:
        """One step; `meanwhile` runs while it is in flight."""
        self.now += 1.0
        plan = self.scheduler.schedule()
        self._check()
        if plan is None:
            assert not self.scheduler.has_unfinished, "requests are live and nothing runs"
            return None
        self._check_plan(plan)
        result = self.runner.execute(plan)
        hit = self._requests_that_fail(plan, result)
        meanwhile()
        self.scheduler.commit(plan, result)
        self._check()
        self.failed |= {request_id for request_id in hit if not self.stories[request_id].cancelled}
        return plan

    def break_draws(self, story: Story, failure: DrawFailure, choice: int = 0) -> None:
        """From now on no token can be drawn for this choice of a live request."""
        state = self.scheduler._requests[story.request.request_id]
        self.runner.failing[state.sequences[choice].choice_key] = failure

    def fail_step(self) -> None:
        """A step that the runner can't compute."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._check_plan(plan)
            self.runner.execute(plan)
        self.failed |= {name for name, story in self.stories.items() if story.final is None}
        self.scheduler.fail("the device is gone")
        self._check()
        assert self.cache.num_free == self.cache.num_pages

    def drain(self, most_steps: int = 20_000) -> None:
        """Run until nothing is left, then verify every promise about the end."""
        for _ in range(most_steps):
            if self.step() is None:
                break
        else:
            raise AssertionError(f"still busy after {most_steps} steps: {self.scheduler.stats()}")
        assert self.cache.num_free + self.cache.num_cached == self.cache.num_pages, "pages leaked"
        assert self.limits.prefix_cache or self.cache.num_cached == 0
        for story in self.stories.values():
            self._check_story(story)

    def running(self) -> list[SequenceState]:
        return self.scheduler._planner.running

    def pages(self, story: Story, choice: int = 0) -> list[int]:
        """The block table of a running choice."""
        for sequence in self.running():
            if sequence.owner.request is story.request and sequence.choice == choice and sequence.table is not None:
                return list(sequence.table.pages)
        raise AssertionError(f"choice {choice} of {story.request.request_id} is not running")

    # Checks

    def _requests_that_fail(self, plan: StepPlan, result: StepResult) -> set[str]:
        failed = {
            row.sequence_id
            for row, draws in zip(plan.rows, result.samples, strict=True)
            if any(isinstance(draw, FailedDraw) for draw in draws)
        }
        return {s.owner.request.request_id for s in self.running() if s.sequence_id in failed}

    def _tokens_of(self, sequence_id: int) -> tuple[str, Sequence[int]]:
        sequence = next(s for s in self.running() if s.sequence_id == sequence_id)
        return sequence.owner.request.salt, [*sequence.owner.request.prompt_token_ids, *sequence.output_ids]

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.rows
        assert sum(len(row.token_ids) for row in plan.rows) <= self.limits.max_batched_tokens
        assert len(self.running()) <= self.limits.max_num_seqs
        planned = {row.sequence_id for row in plan.rows}
        stand_aside = [s for s in self.running() if not s.packed and s.sequence_id not in planned]
        assert not stand_aside or self.cache.num_available == 0, f"no token for {stand_aside}, and pages to spare"
        for sequence in self.running():
            table = sequence.table
            assert table is not None
            seen = self.cache.seen.pop(table, None)
            if seen is None:
                continue
            assert seen.matched == min(seen.resident, seen.limit), f"resident and matched differ: {seen}"
            assert seen.due <= seen.matched, f"admitted although its tokens are in flight: {seen}"
            story = self.stories[sequence.owner.request.request_id]
            if story.cached_tokens is None:
                story.cached_tokens = seen.matched

    def _check(self) -> None:
        self.scheduler.check()
        for event in self.scheduler.take_events():
            story = self.stories[event.request_id]
            assert story.final is None, f"{event} follows the final event"
            if isinstance(event, FinalEvent):
                story.final = event
            else:
                assert not story.finish_reasons(event.choice), f"{event} follows the choice's last event"
                story.events.append(event)

    def _check_story(self, story: Story) -> None:
        request, final = story.request, story.final
        assert final is not None, f"{request.request_id} has no final event"
        usage = final.usage
        assert usage.prompt_tokens == len(request.prompt_token_ids)
        budget = _budget(request, self.limits)
        if budget is None:
            assert final.error is not None
            assert not story.events
            return
        assert usage.cached_tokens == (story.cached_tokens or 0)
        generated = [story.ids(choice) for choice in range(request.sampling.n)]
        assert usage.completion_tokens == sum(map(len, generated))
        assert usage.computed_tokens <= usage.prompt_tokens - usage.cached_tokens
        assert usage.recomputed_tokens == 0 or usage.preemptions or request.sampling.n > 1
        was_cut = final.cancelled or final.error is not None
        assert final.cancelled <= story.cancelled
        assert (final.error is not None) == (request.request_id in self.failed)
        if not was_cut:
            assert usage.computed_tokens == usage.prompt_tokens - usage.cached_tokens
        for choice, ids in enumerate(generated):
            expected = expected_choice(request, choice, budget, self.tokens)
            (reason,) = story.finish_reasons(choice)
            if reason in {FinishReason.STOP, FinishReason.LENGTH}:
                assert (ids, story.text(choice), reason) == (
                    expected.token_ids,
                    expected.text,
                    expected.finish_reason,
                )
            else:
                assert was_cut
                assert ids == expected.token_ids[: len(ids)]
                assert expected.text.startswith(story.text(choice))


def _budget(request: Request, limits: SchedulerLimits) -> int | None:
    """None: refused."""
    try:
        return completion_budget(request, limits)
    except ValueError:
        return None


def length(max_tokens: int | None, n: int = 1) -> SamplingParams:
    """Ends by its length alone."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, n=n)
