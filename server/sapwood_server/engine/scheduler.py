"""The engine's accounts: what to compute next, and what follows from what was drawn. No tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sapwood_server.cache.integrity import require
from sapwood_server.cache.manager import KVCacheManager
from sapwood_server.cache.table import BlockTable
from sapwood_server.cache.tokens import pack_tokens
from sapwood_server.engine.counters import Counters
from sapwood_server.engine.limits import SchedulerLimits, completion_budget
from sapwood_server.engine.planner import Planner
from sapwood_server.engine.sequence import RequestState, SequenceState, TokenTable
from sapwood_server.engine.step import StepBuilder
from sapwood_server.values.events import FinalEvent, FinishReason, TokenEvent, Usage
from sapwood_server.values.messages import EngineStats
from sapwood_server.values.plan import DrawFailure, RowPlan, Sampled, StepPlan, StepResult
from sapwood_server.values.request import Request

__all__ = ["Scheduler", "SchedulerLimits", "TokenTable"]

_logger = logging.getLogger(__name__)


class Scheduler:
    """Requests in, one step after the other, events out.

    `schedule` plans a step, the caller computes it, `commit` takes the result; `add` and `cancel` may come at any
    time between. Every request that was added ends in exactly one FinalEvent.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        tokens: TokenTable,
        clock: Callable[[], float] = time.monotonic,
        cache: KVCacheManager | None = None,
    ) -> None:
        """`clock`: seconds. `cache`: a new one of `limits`' sizes unless given."""
        self._limits = limits
        self._tokens = tokens
        self._clock = clock
        self._cache = cache or KVCacheManager(limits.num_pages, limits.page_size, prefix_cache=limits.prefix_cache)
        self._planner = Planner(limits, self._cache, self._on_admit)
        self._requests: dict[str, RequestState] = {}
        self._choice_keys = 0
        self._counters = Counters()
        self._events: list[TokenEvent | FinalEvent] = []
        self._plan: StepPlan | None = None
        self._rows: tuple[tuple[SequenceState, RowPlan], ...] = ()
        self._ended_choices: list[int] = []
        self._cancelled: list[str] = []
        """Requests to cancel as soon as the step in flight is done: until then the runner writes to their pages."""

    # Requests

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. One that can never run, or that no route should have let through, ends at once in a
        FinalEvent whose error says why.

        Raises ValueError if a request with this id is still live.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use; ids of live requests must differ")
        try:
            state = self._new_state(request)
        except (ValueError, OverflowError) as error:
            usage = Usage(prompt_tokens=len(request.prompt_token_ids))
            self._events.append(FinalEvent(request_id=request.request_id, usage=usage, error=str(error)))
            return
        self._requests[request.request_id] = state
        self._planner.queue.push_new(state.sequences[0])

    def cancel(self, request_id: str) -> None:
        """End a request now, or, while a step is in flight, when it is committed. Unknown ids are ignored: the request
        may just have ended."""
        if self._plan is not None:
            self._cancelled.append(request_id)
        elif request_id in self._requests:
            self._end_request(self._requests[request_id], FinishReason.CANCELLED)

    def fail(self, message: str) -> None:
        """The step in flight can't be computed: end every live request with this error. What the pages hold is unknown,
        so nothing stays cached."""
        self._plan, self._rows = None, ()
        self._cancelled.clear()
        self._cache.end_step()
        for state in tuple(self._requests.values()):
            self._end_request(state, FinishReason.ERROR, message)
        self._cache.clear()

    def take_events(self) -> tuple[TokenEvent | FinalEvent, ...]:
        """The events since the last call, in order."""
        events = tuple(self._events)
        self._events.clear()
        return events

    # Steps

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to do. Raises RuntimeError while a step is in flight."""
        if self._plan is not None:
            raise RuntimeError(f"step {self._plan.step} is in flight; commit it, or fail, before the next")
        step = StepBuilder(self._counters.steps + 1, self._limits.max_batched_tokens)
        self._planner.plan(step)
        if not step.rows:
            return None
        self._counters.steps = step.number
        self._counters.preemptions += step.num_preempted
        self._plan = step.build(self._planner.released, self._ended_choices)
        self._rows = tuple(step.rows.items())
        self._planner.released.clear()
        self._ended_choices.clear()
        return self._plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take the result of the step in flight: publish what was written, append what was drawn, end what is done. A
        draw that failed ends its request with an error.

        Raises ValueError for another plan than the one in flight, or a result of another shape.
        """
        if plan is not self._plan:
            raise ValueError(f"step {plan.step} is not in flight")
        if [len(row.samples) for row in plan.rows] != [len(samples) for samples in result.samples]:
            raise ValueError(f"the result of step {plan.step} does not have a draw for each sample spec")
        rows, self._plan, self._rows = self._rows, None, ()
        failures = {
            index: draw.failure
            for index, draws in enumerate(result.samples)
            for draw in draws
            if not isinstance(draw, Sampled)
        }
        self._cache.end_step()
        for index, failure in failures.items():
            if failure is DrawFailure.NOT_FINITE:
                self._cache.distrust(_table(*rows[index]))
        for sequence, row in rows:
            self._publish(sequence, row)
        for request_id in self._cancelled:
            self.cancel(request_id)
        self._cancelled.clear()
        for index, ((sequence, row), draws) in enumerate(zip(rows, result.samples, strict=True)):
            if sequence.finish_reason is not None:
                continue
            if index in failures:  # before any of its draws counts: with one choice the whole request ends
                self._fail_request(sequence.owner, failures[index])
            elif len(draws) == 1 and isinstance(draws[0], Sampled):
                self._append(sequence, draws[0])
            else:
                for spec, draw in zip(row.samples, draws, strict=True):
                    if isinstance(draw, Sampled):
                        self._append(sequence.owner.sequences[spec.choice], draw)

    def stats(self) -> EngineStats:
        """Totals, and the state now."""
        cache = self._cache
        running = len({id(sequence.owner) for sequence in self._planner.running})
        return EngineStats(
            requests_running=running,
            requests_waiting=len(self._requests) - running,
            pages_free=cache.num_free,
            pages_cached=cache.num_cached,
            pages_active=cache.num_pages - cache.num_free - cache.num_cached,
            **vars(self._counters),
        )

    def check(self) -> None:
        """Verify the whole state (O(pages + requests)); raises IntegrityError that says what is wrong."""
        self._planner.check()
        live = {sequence for state in self._requests.values() for sequence in state.sequences}
        placed = [*self._planner.running, *self._planner.queue]
        require(len(set(placed)) == len(placed), "a sequence is in two places")
        require(set(placed) <= live, "a sequence of an ended request is still placed")
        for state in self._requests.values():
            require(not state.has_ended, f"request {state.request.request_id!r} ended without its last event")
            started = state.first_token_at is not None
            for sequence in state.sequences:
                is_due = sequence.finish_reason is None and (started or sequence.choice == 0)
                require((sequence in placed) == is_due, f"choice {sequence.choice} is in the wrong place")

    # Consequences

    def _new_state(self, request: Request) -> RequestState:
        budget = completion_budget(request, self._limits)
        state = RequestState(request, budget, self._tokens, self._clock())
        packed = pack_tokens(request.prompt_token_ids)
        for choice in range(request.sampling.n):
            self._choice_keys += 1
            state.sequences.append(SequenceState(state, choice, self._choice_keys, packed))
        return state

    def _on_admit(self, sequence: SequenceState, num_cached: int) -> None:
        state = sequence.owner
        if state.admitted_at is None:
            state.admitted_at = self._clock()
            state.cached_tokens = sequence.num_seen = num_cached
            self._counters.prompt_tokens_cached += num_cached

    def _publish(self, sequence: SequenceState, row: RowPlan) -> None:
        end = row.start + len(row.token_ids)
        self._cache.publish(_table(sequence, row), end)
        if row.start == sequence.num_seen >= sequence.owner.num_prompt_tokens:
            sequence.num_seen = end  # a decode step
        else:
            self._counters.count_computed(sequence, row.start, end)
        if row.samples:
            sequence.packed = b""  # all of it is computed: nobody waits for it any more

    def _fail_request(self, state: RequestState, failure: DrawFailure) -> None:
        """End a request with all its choices: each of them is part of one answer, which can't be whole any more."""
        _logger.error("request %s ends with an error: %s", state.request.request_id, failure.value)
        message = f"the engine failed while it ran this request: {failure.value}"
        self._end_request(state, FinishReason.ERROR, message)

    def _append(self, sequence: SequenceState, sampled: Sampled) -> None:
        token_id = sampled.token_id
        state = sequence.owner
        if state.first_token_at is None:
            state.first_token_at = self._clock()
        data = sequence.accept(token_id)
        sequence.sampled_in_step = self._counters.steps
        self._counters.generation_tokens += 1
        self._events.append(
            TokenEvent(
                request_id=state.request.request_id,
                choice=sequence.choice,
                token_ids=(token_id,),
                data=data,
                logprobs=() if sampled.logprob is None else (sampled.logprob,),
                finish_reason=sequence.finish_reason,
            )
        )
        if sequence.finish_reason is not None:
            self._end_choice(sequence)
            if state.has_ended:
                self._end_request(state, None)
        elif sequence.table is not None:
            sequence.table.append(token_id)
        else:  # a choice that forks off its request's prefill: from here on it is like one that was preempted
            sequence.packed += pack_tokens((token_id,))
            sequence.num_seen = state.num_prompt_tokens
            self._planner.queue.push_back(sequence)

    def _end_choice(self, sequence: SequenceState) -> None:
        if sequence.table is not None:
            self._planner.stop(sequence)
        self._ended_choices.append(sequence.choice_key)

    def _end_request(self, state: RequestState, reason: FinishReason | None, error: str | None = None) -> None:
        """Send the request's last events; choices that have not ended by themselves end for `reason`."""
        request_id = state.request.request_id
        for sequence in state.sequences:
            if sequence.finish_reason is not None:
                continue
            if sequence.table is None and (sequence.choice == 0 or state.first_token_at is not None):
                self._planner.queue.remove(sequence)
            sequence.finish_reason = reason
            self._end_choice(sequence)
            self._events.append(
                TokenEvent(request_id=request_id, choice=sequence.choice, token_ids=(), finish_reason=reason)
            )
        del self._requests[request_id]
        self._events.append(
            FinalEvent(
                request_id=request_id,
                usage=state.usage(self._clock()),
                error=error,
                cancelled=reason is FinishReason.CANCELLED,
            )
        )


def _table(sequence: SequenceState, row: RowPlan) -> BlockTable:
    """The pages of a sequence whose step is being committed."""
    if sequence.table is None:
        raise RuntimeError(f"sequence {row.sequence_id} has no pages although its step was in flight")
    return sequence.table
