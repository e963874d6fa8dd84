"""Random traffic against the scheduler and the cache; the promises are checked in `support.scheduler_world`."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sapwood_server.engine.limits import SchedulerLimits
from sapwood_server.values.plan import DrawFailure
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams
from support.scale import scaled
from support.scheduler_world import Story, World

_IDS = st.integers(0, 2)
_STOPS = st.sampled_from([b"a", b"bb", b"aba", b"abab", b"\xc3\xa9", b"baa"])


@st.composite
def _limits(draw: st.DrawFn) -> SchedulerLimits:
    page_size = draw(st.sampled_from([1, 2, 3, 4, 4, 16, 16, 32, 64]))
    return SchedulerLimits(
        num_pages=1 + draw(st.integers(2, 20 if page_size < 16 else 6)),
        page_size=page_size,
        max_num_seqs=draw(st.integers(1, 6)),
        max_batched_tokens=draw(st.sampled_from([1, 2, 3, 7, 16, 40, 100])),
        max_model_len=draw(st.sampled_from([20, 60, 10_000])),
        prefix_cache=draw(st.sampled_from([True, True, True, True, False])),
    )


@st.composite
def _sampling(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=draw(st.one_of(st.none(), st.integers(1, 12))),
        min_tokens=draw(st.sampled_from([0, 0, 0, 2, 5])),
        stop=tuple(draw(st.lists(_STOPS, max_size=2))),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 7), max_size=1))),
        ignore_eos=draw(st.booleans()),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
    )


class Traffic(RuleBasedStateMachine):
    """Requests that share prefixes arrive, alone and together, and are stepped, cancelled, preempted and failed."""

    world: World

    @initialize(limits=_limits())
    def start(self, limits: SchedulerLimits) -> None:
        self.world = World(limits)

    @rule(data=st.data(), copies=st.sampled_from([1, 1, 1, 2, 4]))
    def submit(self, data: st.DataObject, copies: int) -> None:
        for _ in range(copies):
            self._submit(data)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @precondition(lambda self: self.world.scheduler.has_unfinished)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._cancel(data)

    @precondition(lambda self: self.world.scheduler.has_unfinished)
    @rule(data=st.data(), submits=st.booleans(), cancels=st.integers(0, 2))
    def interrupted_step(self, data: st.DataObject, submits: bool, cancels: int) -> None:
        def meanwhile() -> None:
            if submits:
                self._submit(data)
            for _ in range(cancels):
                self._cancel(data)

        self.world.step(meanwhile)

    @precondition(lambda self: self.world.scheduler.has_unfinished)
    @rule(data=st.data(), failure=st.sampled_from(DrawFailure))
    def break_draws(self, data: st.DataObject, failure: DrawFailure) -> None:
        live = [story for story in self.world.stories.values() if story.final is None]
        story: Story = data.draw(st.sampled_from(live))
        self.world.break_draws(story, failure, data.draw(st.integers(0, story.request.sampling.n - 1)))

    @precondition(lambda self: self.world.scheduler.has_unfinished)
    @rule(really=st.integers(0, 9))
    def fail(self, really: int) -> None:
        if really == 0:
            self.world.fail_step()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()

    def _submit(self, data: st.DataObject) -> None:
        """The prompt is some tokens of an earlier request and its answer, if any, and some new ones."""
        stories = list(self.world.stories.values())
        known: tuple[int, ...] = ()
        if stories and data.draw(st.integers(0, 4)) > 0:
            which: int = data.draw(st.integers(0, len(stories) - 1))
            known = stories[which].request.prompt_token_ids + stories[which].ids(0)
            length: int = data.draw(st.integers(len(known) // 2, len(known)))
            known = known[:length]
        size = self.world.limits.page_size
        fresh = data.draw(st.lists(_IDS, min_size=0 if known else 1, max_size=min(2 * size + 2, 40)))
        if size >= 16:
            known *= data.draw(st.sampled_from([1, 1, 2]))
        sampling = data.draw(_sampling())
        forced = st.lists(st.integers(0, 7), max_size=6).map(tuple)
        request = Request(
            request_id=f"r{len(stories)}",
            prompt_token_ids=(*known, *fresh),
            sampling=sampling,
            salt=data.draw(st.sampled_from(["", "", "", "other"])),
            priority=data.draw(st.sampled_from([0, 0, 0, 1, -1])),
            forced_tokens=tuple(data.draw(forced) for _ in range(sampling.n))
            if data.draw(st.integers(0, 3)) == 0
            else (),
        )
        self.world.submit(request)

    def _cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.stories))))


Traffic.TestCase.settings = settings(
    max_examples=scaled(2000),
    stateful_step_count=25,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),  # "explain" traces every line: ten times slower
)

TestTraffic = pytest.mark.timeout(1200)(Traffic.TestCase)  # minutes at full scale
