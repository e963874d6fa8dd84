"""A live request and its choices, from arrival to the last event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sapwood_server.cache.node import PageNode
from sapwood_server.cache.table import BlockTable
from sapwood_server.formats.stop import StopMatcher, StopStrings
from sapwood_server.values.events import FinishReason, Usage
from sapwood_server.values.plan import SampleSpec
from sapwood_server.values.request import Request


class TokenTable(Protocol):
    """What the scheduler needs to know of a vocabulary."""

    @property
    def token_bytes(self) -> Sequence[bytes]:
        """Per id the bytes of its text; empty for control tokens."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a text unless `ignore_eos`."""


class RequestState:
    """One request while it is live, and what its usage will say."""

    def __init__(self, request: Request, budget: int, tokens: TokenTable, arrived_at: float) -> None:
        """`budget`: most tokens each choice may generate. `arrived_at`: seconds on the scheduler's clock.

        Raises ValueError for a number of choices, forced tokens, or a stop string, that can't be run.
        """
        sampling = request.sampling
        if sampling.n < 1:
            raise ValueError(f"n is {sampling.n}; accepted: at least 1")
        if len(request.forced_tokens) not in {0, sampling.n}:
            raise ValueError(f"forced_tokens are for {len(request.forced_tokens)} choices, n is {sampling.n}")
        unknown = {id_ for ids in request.forced_tokens for id_ in ids if not 0 <= id_ < len(tokens.token_bytes)}
        if unknown:
            raise ValueError(f"forced_tokens hold {min(unknown)}; accepted: ids below {len(tokens.token_bytes)}")
        self.request = request
        self.budget = budget
        self.token_bytes = tokens.token_bytes
        self.end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else tokens.eos_ids)
        """Ids that end a choice."""
        self.banned_ids = tuple(sorted(self.end_ids))
        self.stops = StopStrings(sampling.stop) if sampling.stop else None
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.arrived_at = arrived_at
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.sequences: list[SequenceState] = []
        """One per choice, in order."""
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0

    @property
    def has_ended(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def usage(self, now: float) -> Usage:
        """Counts and seconds so far; a phase that was never left lasts until `now`."""
        admitted_at = now if self.admitted_at is None else self.admitted_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=sum(len(sequence.output_ids) for sequence in self.sequences),
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
            queue_seconds=admitted_at - self.arrived_at,
            prefill_seconds=max(0.0, first_token_at - admitted_at),
        )


class SequenceState:
    """One choice of a request. It is waiting (holds nothing) or running (has a block table)."""

    __slots__ = (
        "_fixed_draw",
        "_fixed_from",
        "choice",
        "choice_key",
        "finish_reason",
        "hint",
        "num_seen",
        "order",
        "output_ids",
        "overtaken",
        "owner",
        "packed",
        "sampled_in_step",
        "sequence_id",
        "shared_tokens",
        "stop",
        "table",
        "waits_for",
    )

    def __init__(self, owner: RequestState, choice: int, choice_key: int, packed: bytes) -> None:
        request = owner.request
        self.owner = owner
        self.choice = choice
        self.choice_key = choice_key
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop = StopMatcher(owner.stops) if owner.stops is not None else None
        self.order: tuple[int, ...] = ()
        """Sorts the waiting, and the running sequences: the first is served first, the last preempted first."""
        self.sampled_in_step = 0
        """The step that drew the last token; 0: none yet."""
        self.num_seen = 0
        """Leading positions that were cached at first admission or have been computed since: again is recompute."""
        # While running:
        self.table: BlockTable | None = None
        self.sequence_id = 0
        """0 while waiting; another one after each admission."""
        # While waiting, and until all of it is computed:
        self.packed = packed
        """All tokens so far."""
        # While waiting:
        self.hint: PageNode | None = None
        """Where the last match ended."""
        self.waits_for: InFlight | None = None
        self.shared_tokens: dict[int, int] = {}
        """By the sequence id of a sequence that may be waited for: how many leading tokens it shares with this one."""
        self.overtaken = 0
        """Requests that arrived later and were admitted before this one."""
        self._fixed_draw: tuple[SampleSpec, ...] | None = None
        self._fixed_from = max(request.sampling.min_tokens, len(self._forced_ids()))

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return self.owner.num_prompt_tokens + len(self.output_ids)

    @property
    def num_computed(self) -> int:
        """Leading positions whose KV this sequence's pages hold."""
        return self.table.num_written if self.table is not None else 0

    @property
    def awaits_tokens(self) -> bool:
        """Whether what this sequence waits for is still to come."""
        return self.waits_for is not None and self.waits_for.is_due

    def token_ids(self, start: int, end: int) -> Sequence[int]:
        """The ids at positions `[start, end)`."""
        prompt = self.owner.request.prompt_token_ids
        size = len(prompt)
        if end <= size:
            return prompt[start:end]
        if start >= size:
            return tuple(self.output_ids[start - size : end - size])
        return (*prompt[start:], *self.output_ids[: end - size])

    def draws(self) -> tuple[SampleSpec, ...]:
        """The draw of this sequence's next token, as a tuple of one. After the last forced or banned position it is the
        same object in every step."""
        if self._fixed_draw is not None:
            return self._fixed_draw
        position = len(self.output_ids)
        forced = self._forced_ids()
        sampling = self.owner.request.sampling
        draws = (
            SampleSpec(
                choice_key=self.choice_key,
                choice=self.choice,
                sampling=sampling,
                prompt_ids=self.owner.request.prompt_token_ids,
                output_ids=self.output_ids,
                forced=forced[position] if position < len(forced) else None,
                banned_ids=self.owner.banned_ids if position < sampling.min_tokens else (),
            ),
        )
        if position >= self._fixed_from:
            self._fixed_draw = draws
        return draws

    def accept(self, token_id: int) -> bytes:
        """Append a sampled token; returns the text bytes it releases, and sets `finish_reason` if it is the last.

        Until `min_tokens` are exceeded nothing but the budget ends the choice, stop strings included (as they are
        looked for in the text after that only).
        """
        owner = self.owner
        self.output_ids.append(token_id)
        count = len(self.output_ids)
        may_stop = count > owner.request.sampling.min_tokens
        if may_stop and token_id in owner.end_ids:
            self.finish_reason = FinishReason.STOP
            return self.flush()
        data = owner.token_bytes[token_id]
        if may_stop and self.stop is not None:
            data = self.stop.feed(data)
            if self.stop.matched:
                self.finish_reason = FinishReason.STOP
                return data
        if count >= owner.budget:
            self.finish_reason = FinishReason.LENGTH
            return data + self.flush()
        return data

    def flush(self) -> bytes:
        """Text bytes still held back as the possible beginning of a stop string."""
        return self.stop.flush() if self.stop is not None else b""

    def _forced_ids(self) -> Sequence[int]:
        forced = self.owner.request.forced_tokens
        return forced[self.choice] if forced else ()


class InFlight:
    """Tokens that an admitted sequence is due to compute and another one waits for."""

    __slots__ = ("_leader", "_num_tokens", "_sequence_id")

    def __init__(self, leader: SequenceState, num_tokens: int) -> None:
        """`num_tokens`: leading tokens that both share; due until the leader has computed them."""
        self._leader = leader
        self._sequence_id = leader.sequence_id
        self._num_tokens = num_tokens

    @property
    def is_due(self) -> bool:
        """False once they are computed, or the leader ended or was preempted."""
        return self._leader.sequence_id == self._sequence_id and self._leader.num_computed < self._num_tokens
