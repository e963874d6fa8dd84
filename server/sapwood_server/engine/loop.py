"""The engine's loop: one step after the other, and everything that may interrupt it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Protocol

from sapwood_server.quoting import reason_of
from sapwood_server.values.events import FinalEvent, TokenEvent
from sapwood_server.values.messages import (
    Cancel,
    EngineInfo,
    EngineStats,
    FromEngine,
    Shutdown,
    StepOutput,
    StepSeconds,
    Submit,
    ToEngine,
)
from sapwood_server.values.plan import StepPlan, StepResult
from sapwood_server.values.request import Request

_logger = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0
"""An idle engine sends its stats this often."""

_MAX_FAILED_STEPS = 5
"""Failed steps in a row before the engine gives up. A step that fails on what one request asked for is followed by one
that works; a device that is gone fails every step, and only a new process can bring it back. (A draw that fails is no
failed step: it ends its request alone, however often that request is sent.)"""


class Runner(Protocol):
    """What computes a step: the model, its KV pages and the sampler."""

    @property
    def info(self) -> EngineInfo:
        """What was decided when the model was loaded."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute every row of the plan. An exception fails every live request; the next plan releases their
        sequences, also those that this runner has not seen yet."""


class StepScheduler(Protocol):
    """What decides the steps; `Scheduler` says more about each method."""

    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def schedule(self) -> StepPlan | None: ...
    def commit(self, plan: StepPlan, result: StepResult) -> None: ...
    def fail(self, message: str) -> None: ...
    def take_events(self) -> tuple[TokenEvent | FinalEvent, ...]: ...
    def stats(self) -> EngineStats: ...
    def check(self) -> None: ...


class Channel(Protocol):
    """The engine's end of the socket; `EngineChannel` says more about each method."""

    def send(self, message: FromEngine) -> None: ...
    def receive(self, timeout_seconds: float) -> ToEngine | None: ...


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The two halves that the loop drives."""

    scheduler: StepScheduler
    runner: Runner


class EngineBrokenError(Exception):
    """The runner fails every step: this process can't go on."""


class EngineLoop:
    """Takes messages, runs steps, sends what came of them: one StepOutput per step, and one a second when idle."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        self._channel = channel
        self._scheduler = engine.scheduler
        self._runner = engine.runner
        self._live: set[str] = set()
        self._stopping = False
        self._failed_steps = 0

    def stop(self) -> None:
        """Cancel what runs and return from `run`, as Shutdown does. May be called by a signal handler."""
        self._stopping = True

    def run(self) -> None:
        """Serve until Shutdown or `stop`.

        What it raises is fatal: the books of scheduler and cache can't be trusted any more, or the runner is broken.
        """
        busy = True  # the first stats are sent at once
        while not self._stopping or self._live:
            self._receive(wait_seconds=0.0 if busy or self._stopping else _IDLE_SECONDS)
            busy = self._step()

    def _receive(self, wait_seconds: float) -> None:
        message = self._channel.receive(wait_seconds)
        while message is not None:
            match message:
                case Submit(request):
                    self._live.add(request.request_id)
                    self._scheduler.add(request)
                case Cancel(request_id):
                    self._scheduler.cancel(request_id)
                case Shutdown():
                    self._stopping = True
            message = self._channel.receive(0.0)
        if self._stopping:
            for request_id in self._live:
                self._scheduler.cancel(request_id)

    def _step(self) -> bool:
        """Run a step if there is one to run, and say so; send its events."""
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        seconds = None
        if plan is not None:
            planned = time.perf_counter()
            result = self._execute(plan)
            if result is not None:
                executed = time.perf_counter()
                self._scheduler.commit(plan, result)
                seconds = StepSeconds(
                    schedule=planned - started + time.perf_counter() - executed,
                    forward=result.forward_seconds,
                    sample=result.sample_seconds,
                )
        self._send(seconds)
        return plan is not None

    def _execute(self, plan: StepPlan) -> StepResult | None:
        """The runner's result; None if it failed, and then every live request has got its final event."""
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            _logger.exception("step %d failed; its requests end with an error", plan.step)
            reason = f"{type(error).__name__}: {reason_of(error)}"
            self._failed_steps += 1
            if self._failed_steps >= _MAX_FAILED_STEPS:
                raise EngineBrokenError(
                    f"{self._failed_steps} steps in a row failed, the last with {reason}"
                ) from error
            self._scheduler.fail(f"the engine failed while it ran this request: {reason}")
            self._scheduler.check()
            return None
        self._failed_steps = 0
        return result

    def _send(self, step_seconds: StepSeconds | None) -> None:
        events = self._scheduler.take_events()
        self._live.difference_update(event.request_id for event in events if isinstance(event, FinalEvent))
        self._channel.send(StepOutput(events=events, stats=self._scheduler.stats(), step_seconds=step_seconds))
