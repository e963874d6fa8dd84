"""The engine loop over the real scheduler, with a scripted runner and a scripted channel."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import pytest

from sapwood_server.engine.loop import Engine, EngineBrokenError, EngineLoop
from sapwood_server.engine.scheduler import Scheduler
from sapwood_server.values.events import FinalEvent, FinishReason, TokenEvent
from sapwood_server.values.messages import Cancel, FromEngine, Shutdown, StepOutput, Submit, ToEngine
from sapwood_server.values.plan import StepPlan, StepResult
from support.engine_requests import Answer, answer_of, make_request
from support.scripted_engine import (
    RAISE_ID,
    UNDRAWABLE_ID,
    ByteTable,
    ScriptedRunner,
    completion,
    limits_of,
    scripted_engine,
)

STEP = None
"""In a script: nothing more has come, so a step runs."""


class ScriptedChannel:
    """Gives the loop one message after the other, and at the end a Shutdown; keeps what the loop sends."""

    def __init__(self, *script: ToEngine | None) -> None:
        self._script = deque(script)
        self.sent: list[StepOutput] = []
        self.waits: list[float] = []

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, StepOutput)
        self.sent.append(message)

    def receive(self, timeout_seconds: float) -> ToEngine | None:
        self.waits.append(timeout_seconds)
        if self._script:
            return self._script.popleft()
        busy = timeout_seconds == 0.0
        return None if busy else Shutdown()

    @property
    def steps(self) -> list[StepOutput]:
        """The outputs in which a step ran."""
        return [output for output in self.sent if output.step_seconds is not None]

    def answer(self, request_id: str) -> Answer:
        """The events of one request; checks that it has exactly one final event, the last."""
        return answer_of([e for output in self.sent for e in output.events if e.request_id == request_id])


class TimedRunner(ScriptedRunner):
    """Reports fixed durations."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        return StepResult(samples=result.samples, forward_seconds=0.5, sample_seconds=0.25)


class InterruptedRunner(ScriptedRunner):
    """Calls `interrupt` in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt: Callable[[], None] = lambda: None

    def execute(self, plan: StepPlan) -> StepResult:
        self.interrupt()
        return super().execute(plan)


class BrokenBooks(Scheduler):
    """Finds its own state inconsistent."""

    def check(self) -> None:
        raise AssertionError("page 7 is free and in use")


def run_loop(channel: ScriptedChannel, engine: Engine | None = None) -> None:
    EngineLoop(channel, engine or scripted_engine(ScriptedRunner())).run()


def test_request_runs_to_its_end_one_token_a_step() -> None:
    channel = ScriptedChannel(Submit(make_request("a", (1, 2, 3), max_tokens=5)))
    run_loop(channel)
    answer = channel.answer("a")
    assert answer.token_ids == completion((1, 2, 3), 5)
    assert answer.data == bytes(answer.token_ids)
    assert (answer.final.error, answer.final.cancelled) == (None, False)
    assert answer.final.usage.completion_tokens == 5
    assert len(channel.steps) == 5
    finishes = [e.finish_reason for s in channel.sent for e in s.events if isinstance(e, TokenEvent)]
    assert finishes == [None] * 4 + [FinishReason.LENGTH]


def test_everything_that_has_come_is_read_before_a_step() -> None:
    channel = ScriptedChannel(*(Submit(make_request(name, (ord(name),) * 3, max_tokens=2)) for name in "abc"))
    run_loop(channel)
    assert len(channel.steps) == 2
    assert {event.request_id for event in channel.steps[0].events} == {"a", "b", "c"}


def test_request_joins_a_running_batch() -> None:
    first, second = make_request("a", (1, 2), max_tokens=6), make_request("b", (9, 8), max_tokens=3)
    channel = ScriptedChannel(Submit(first), STEP, STEP, Submit(second))
    run_loop(channel)
    assert channel.answer("a").token_ids == completion((1, 2), 6)
    assert channel.answer("b").token_ids == completion((9, 8), 3)
    assert len(channel.steps) == 6


def test_cancel_ends_a_request_before_the_next_step() -> None:
    running, bystander = make_request("a", (5,), max_tokens=1000), make_request("b", (6,), max_tokens=9)
    channel = ScriptedChannel(Submit(running), Submit(bystander), STEP, STEP, Cancel("a"), Cancel("unknown"))
    run_loop(channel)
    cancelled = channel.answer("a")
    assert cancelled.final.cancelled
    assert cancelled.token_ids == completion((5,), 2)
    assert channel.answer("b").token_ids == completion((6,), 9)


def test_cancelling_the_only_request_is_answered_at_once() -> None:
    channel = ScriptedChannel(Submit(make_request("a", max_tokens=1000)), STEP, Cancel("a"))
    run_loop(channel)
    assert channel.answer("a").final.cancelled
    assert channel.sent[-1].stats.requests_running == 0


def test_shutdown_cancels_what_runs_and_what_waits() -> None:
    engine = scripted_engine(ScriptedRunner(max_num_seqs=1))
    script = [Submit(make_request(name, max_tokens=1000)) for name in "ab"]
    channel = ScriptedChannel(*script, STEP, Shutdown())
    run_loop(channel, engine)
    assert channel.answer("a").final.cancelled
    assert channel.answer("b").final.cancelled
    assert channel.sent[-1].stats.pages_active == 0


def test_stop_works_as_shutdown_does() -> None:
    """As a signal handler calls it: in the middle of a step."""
    runner = InterruptedRunner()
    channel = ScriptedChannel(Submit(make_request("a", (5,), max_tokens=1000)))
    loop = EngineLoop(channel, scripted_engine(runner))
    runner.interrupt = loop.stop
    loop.run()
    answer = channel.answer("a")
    assert answer.final.cancelled
    assert answer.token_ids == completion((5,), 1)


def test_failed_step_ends_every_live_request_once_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    poison, bystander = make_request("poison", (1, RAISE_ID)), make_request("bystander", (4, 5), max_tokens=50)
    channel = ScriptedChannel(
        Submit(bystander), STEP, STEP, Submit(poison), STEP, Submit(make_request("next", (4, 5, 6), max_tokens=4))
    )
    with caplog.at_level(logging.ERROR):
        run_loop(channel)
    reason = "the engine failed while it ran this request: ValueError: a token that can't be computed"
    assert channel.answer("poison").final.error == reason
    assert channel.answer("bystander").final.error == reason
    assert channel.answer("bystander").token_ids == completion((4, 5), 2)
    following = channel.answer("next")
    assert following.token_ids == completion((4, 5, 6), 4)
    assert following.final.usage.cached_tokens == 0, "what a failed step may have written is never reused"
    assert "Traceback" in caplog.text


def test_draws_that_fail_end_their_requests_and_no_others() -> None:
    """More often in a row than steps may fail."""
    bystander = make_request("bystander", (4, 5), max_tokens=20)
    channel = ScriptedChannel(Submit(bystander), *poisoned(*"12345678", token_id=UNDRAWABLE_ID))
    run_loop(channel)
    assert channel.answer("bystander").token_ids == completion((4, 5), 20)
    assert channel.answer("bystander").final.error is None
    for name in "12345678":
        assert channel.answer(name).final.error == (
            "the engine failed while it ran this request: the model gave logits that are not finite"
        )
        assert channel.answer(name).token_ids == ()


def poisoned(*request_ids: str, token_id: int = RAISE_ID) -> list[ToEngine | None]:
    """A script of steps that fail, or of draws, one request in each."""
    return [item for name in request_ids for item in (Submit(make_request(name, (token_id,))), STEP)]


def test_five_failed_steps_in_a_row_are_fatal() -> None:
    with pytest.raises(EngineBrokenError, match="5 steps in a row failed, the last with ValueError: a token that"):
        run_loop(ScriptedChannel(*poisoned(*"12345")))


def test_a_step_that_works_forgives_those_that_failed() -> None:
    channel = ScriptedChannel(*poisoned(*"1234"), Submit(make_request("good", max_tokens=1)), STEP, *poisoned(*"5678"))
    run_loop(channel)
    assert channel.answer("good").final.error is None
    assert channel.answer("8").final.error is not None


def test_inconsistent_books_are_fatal() -> None:
    runner = ScriptedRunner()
    engine = Engine(scheduler=BrokenBooks(limits_of(runner), ByteTable()), runner=runner)
    with pytest.raises(AssertionError, match="page 7 is free and in use"):
        run_loop(ScriptedChannel(*poisoned("1")), engine)


def test_idle_engine_waits_and_sends_its_stats() -> None:
    channel = ScriptedChannel(STEP, STEP, Submit(make_request("a", max_tokens=2)))
    run_loop(channel)
    idle = channel.sent[:2]
    assert [(output.events, output.step_seconds) for output in idle] == [((), None), ((), None)]
    at_start, when_idle, first_message, *in_the_step = channel.waits[:5]
    assert at_start == 0.0, "the first stats are sent at once"
    assert when_idle == first_message > 0.0, "an idle loop blocks in the socket"
    assert in_the_step == [0.0, 0.0], "a busy one does not"


def test_seconds_of_a_step_are_sent() -> None:
    channel = ScriptedChannel(Submit(make_request("a", max_tokens=4)))
    run_loop(channel, scripted_engine(TimedRunner()))
    assert len(channel.steps) == 4
    for output in channel.steps:
        assert output.step_seconds is not None
        assert output.step_seconds.schedule > 0
        assert (output.step_seconds.forward, output.step_seconds.sample) == (0.5, 0.25)


def test_final_events_are_the_last_word() -> None:
    script = [Submit(make_request(str(number), (number + 1,), max_tokens=3)) for number in range(20)]
    channel = ScriptedChannel(*script, STEP, Cancel("3"), Cancel("3"), STEP, Cancel("4"))
    run_loop(channel)
    finals = [e.request_id for output in channel.sent for e in output.events if isinstance(e, FinalEvent)]
    assert sorted(finals, key=int) == [str(number) for number in range(20)]
