"""Who is admitted next."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from sapwood_server.cache.tokens import common_tokens
from sapwood_server.engine.sequence import InFlight, SequenceState

MAX_OVERTAKEN = 16
"""Later arrivals of its priority that may be admitted before a request; then it goes first. A hit is worth going first
because it may be evicted while it waits, but that must cost the others a bounded time: here that of 16 admissions."""

_WINDOW = 256
"""Waiting sequences that are compared, oldest first: keeps a step's cost bounded when thousands queue up."""

_order = attrgetter("order")


class AdmissionQueue:
    """Waiting sequences: by priority, then those that were running before (in their old order), then new requests.

    New ones of one priority are admitted longest prefix hit first, except that one overtaken `MAX_OVERTAKEN` times
    goes before all that were not. Priority is strict: a lower class waits for as long as better ones keep coming.
    """

    def __init__(self) -> None:
        self._waiting: list[SequenceState] = []
        self._arrivals = 0
        self.version = 0
        """Another one after each change."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._waiting)

    def push_new(self, sequence: SequenceState) -> None:
        """Queue the first choice of a request that has just arrived."""
        self._arrivals += 1
        self.version += 1
        sequence.order = (sequence.owner.request.priority, 1, self._arrivals)
        insort(self._waiting, sequence, key=_order)

    def push_back(self, sequence: SequenceState) -> None:
        """Queue a sequence of an admitted request: preempted, or a choice that forks off. It keeps its order."""
        self.version += 1
        insort(self._waiting, sequence, key=_order)

    def remove(self, sequence: SequenceState) -> None:
        """Take out a sequence that was admitted or has ended. Raises ValueError if it does not wait."""
        index = bisect_left(self._waiting, sequence.order, key=_order)
        if index == len(self._waiting) or self._waiting[index] is not sequence:
            raise ValueError(f"choice {sequence.choice} of {sequence.owner.request.request_id!r} does not wait")
        del self._waiting[index]
        self.version += 1

    def ranked(self, hit_pages: Callable[[SequenceState], int]) -> list[SequenceState]:
        """The waiting sequences in the order in which to admit them, without those whose tokens are in flight.
        `hit_pages`: whole pages that a sequence would reuse now."""
        ranked: list[SequenceState] = []
        for sequence in self._waiting:
            if not sequence.awaits_tokens:
                ranked.append(sequence)
                if len(ranked) == _WINDOW:
                    break
        if len(ranked) > 1:
            ranked.sort(key=lambda sequence: _rank(sequence, hit_pages))
        return ranked

    def take(self, sequence: SequenceState) -> None:
        """`remove` an admitted new request, and note whom it overtook."""
        priority, _, _ = sequence.order
        self.remove(sequence)
        first = bisect_left(self._waiting, (priority, 1), key=_order)
        for other in self._waiting[first : bisect_left(self._waiting, sequence.order, key=_order)]:
            other.overtaken += 1


def find_in_flight(sequence: SequenceState, num_matched: int, admitted: Iterable[SequenceState]) -> InFlight | None:
    """What `sequence` should wait for: the most tokens beyond its `num_matched` resident ones that one of `admitted`
    is due to compute. Those are sequences with the same salt that still have `packed` tokens to compute."""
    limit = sequence.num_tokens - 1  # the last token must be computed by the sequence itself
    best, best_tokens = None, num_matched
    for leader in admitted:
        shared = sequence.shared_tokens.get(leader.sequence_id)
        if shared is None:
            shared = min(common_tokens(sequence.packed, leader.packed), limit)
            sequence.shared_tokens[leader.sequence_id] = shared
        if shared > best_tokens:
            best, best_tokens = leader, shared
    return InFlight(best, best_tokens) if best is not None else None


def _rank(sequence: SequenceState, hit_pages: Callable[[SequenceState], int]) -> tuple[int, ...]:
    priority, is_new, *rest = sequence.order
    if not is_new:
        return (priority, 0, *rest)
    if sequence.overtaken >= MAX_OVERTAKEN:
        return (priority, 1, *rest)
    return (priority, 2, -hit_pages(sequence), *rest)
