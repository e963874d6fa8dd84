"""Which tokens are computed next: running sequences, preemption, admission."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from sapwood_server.cache.integrity import require
from sapwood_server.cache.manager import KVCacheManager
from sapwood_server.cache.table import BlockTable
from sapwood_server.cache.tree import Match
from sapwood_server.engine.admission import AdmissionQueue, find_in_flight
from sapwood_server.engine.limits import SchedulerLimits
from sapwood_server.engine.sequence import SequenceState
from sapwood_server.engine.step import StepBuilder

_order = attrgetter("order")


class Planner:
    """Running and waiting sequences, and the pages that the running ones hold.

    Each step: decodes first, then what remains of running prefills, then admissions, up to `max_batched_tokens`.
    Running sequences are served in order of priority and first admission; for want of a page the last in that order
    is preempted. So the first always makes progress: when it is alone, and short of pages because it holds
    duplicates of pages in the tree, it is itself preempted and comes back without them.

    No more sequences run than a step has tokens, however large `max_num_seqs` is: each that runs takes one at least,
    and one is admitted only while some are left. So every sequence that decodes gets its token in every step, but for
    want of a page.
    """

    def __init__(
        self, limits: SchedulerLimits, cache: KVCacheManager, on_admit: Callable[[SequenceState, int], None]
    ) -> None:
        """`on_admit(sequence, num_cached)` is told of each admission and how many leading tokens were resident."""
        self._limits = limits
        self._cache = cache
        self._on_admit = on_admit
        self.running: list[SequenceState] = []
        self.queue = AdmissionQueue()
        self._last_sequence_id = 0
        self._admissions = 0
        self._blocked = (-1, 0)
        """Version of the queue and pages to spare when its first did not fit, nobody's tokens being in flight."""
        self.released: list[int] = []
        """Sequence ids that stopped running since `plan` was last called with success."""

    def plan(self, step: StepBuilder) -> None:
        """Fill `step`; its rows stay empty only if nothing is running or waiting."""
        self._plan_running(step)
        if step.rows and step.num_preempted:
            return  # what was just preempted for want of room would be the first to come back
        self._plan_admissions(step)
        require(bool(step.rows) or not (self.running or self.queue), "sequences are waiting and none can run")

    def stop(self, sequence: SequenceState) -> None:
        """Take a running sequence's pages away; its published ones stay cached."""
        table = self._table(sequence)
        self.running.remove(sequence)
        self.released.append(sequence.sequence_id)
        self._cache.release(table)
        sequence.table = None
        sequence.sequence_id = 0

    def check(self) -> None:
        """Raise IntegrityError unless exactly the running sequences hold pages."""
        self._cache.check()
        require(self.running == sorted(self.running, key=_order), "running sequences are out of order")
        most = min(self._limits.max_num_seqs, self._limits.max_batched_tokens)
        require(len(self.running) <= most, f"{len(self.running)} sequences run; at most {most} may")
        require(all(s.table is not None and s.sequence_id for s in self.running), "a running sequence holds no pages")
        require(all(s.table is None and not s.sequence_id for s in self.queue), "a waiting sequence holds pages")
        num_tables = self._cache.num_sequences
        require(num_tables == len(self.running), f"{num_tables} block tables, {len(self.running)} running sequences")

    # Running sequences

    def _plan_running(self, step: StepBuilder) -> None:
        prefills: list[SequenceState] = []
        page_size = self._cache.page_size
        index = 0
        while index < len(self.running):  # preemption shortens the list, from its end
            sequence = self.running[index]
            index += 1
            if sequence.packed:
                prefills.append(sequence)
                continue
            if not step.tokens_left:
                continue
            table = self._table(sequence)
            if table.num_written < len(table.pages) * page_size:
                step.add_decode(sequence, table.num_written, ())
            elif self._make_room(step, sequence, table):
                step.add_decode(sequence, table.num_written, self._cache.extend(table, 1))
        for sequence in prefills:
            if not step.tokens_left:
                break
            if sequence.table is not None and self._make_room(step, sequence, sequence.table):
                self._add_chunk(step, sequence, sequence.table)

    def _make_room(self, step: StepBuilder, sequence: SequenceState, table: BlockTable) -> bool:
        """Preempt until `sequence` can compute a token. False if it can't: it is itself the last in order, and waits
        for the others, holding what it has, or, where no other runs, was preempted."""
        while self._cache.room(table) < 1:
            victim = self.running[-1]
            if victim is sequence and len(self.running) > 1:
                return False
            self._preempt(step, victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, step: StepBuilder, sequence: SequenceState) -> None:
        step.remove_row(sequence)
        step.num_preempted += 1
        sequence.packed = bytes(self._table(sequence).data)
        sequence.owner.preemptions += 1
        self.stop(sequence)
        self.queue.push_back(sequence)

    def _add_chunk(self, step: StepBuilder, sequence: SequenceState, table: BlockTable, first: bool = False) -> None:
        """Plan as many of the sequence's tokens as the step and the pages have room for."""
        start = table.num_written
        num_tokens = min(sequence.num_tokens - start, step.tokens_left, self._cache.room(table))
        new_pages = self._cache.extend(table, num_tokens)
        step.add_chunk(sequence, start, num_tokens, tuple(table.pages) if first else new_pages)

    # Admission

    def _plan_admissions(self, step: StepBuilder) -> None:
        if not self.queue or not step.tokens_left or len(self.running) >= self._limits.max_num_seqs:
            return
        spare = self._spare_pages()
        if self.running and (spare <= 0 or self._is_blocked(spare)):
            return
        computing: dict[str, list[SequenceState]] = {}
        for sequence in self.running:
            if sequence.packed:
                computing.setdefault(sequence.owner.request.salt, []).append(sequence)
        ranked = self.queue.ranked(self._hit_pages)
        may_block = len(ranked) == len(self.queue)
        for sequence in ranked:
            if not step.tokens_left or len(self.running) >= self._limits.max_num_seqs:
                return
            match = self._match(sequence)
            peers = computing.setdefault(sequence.owner.request.salt, [])
            if self._cache.prefix_cache:
                sequence.waits_for = find_in_flight(sequence, match.num_tokens, peers)
                if sequence.waits_for is not None:
                    may_block = False
                    continue
            missing = self._cache.pages_for(sequence.num_tokens) - match.num_pages
            if not self._cache.has_room(match, missing + len(self.running)):
                if may_block:
                    self._blocked = self.queue.version, self._spare_pages()
                return  # nobody behind it goes first: it would starve
            self._admit(step, sequence, match)
            peers.append(sequence)

    def _spare_pages(self) -> int:
        """Pages for admissions: all but one for the growth of each running sequence, so that an admission does not make
        one of them preempt soon. (The rest of a running prefill needs none set aside: nothing is admitted before it,
        as it takes what the step has left, in tokens or in pages.)"""
        return self._cache.num_available - len(self.running)

    def _is_blocked(self, spare: int) -> bool:
        """Whether the sequence to be admitted next can't fit now because it did not with as many pages, and the queue
        is the same: saves comparing all that wait in every step of a full pool."""
        version, spare_then = self._blocked
        return version == self.queue.version and spare <= spare_then

    def _admit(self, step: StepBuilder, sequence: SequenceState, match: Match) -> None:
        if sequence.owner.admitted_at is None:
            self._admissions += 1
            self.queue.take(sequence)
            for choice in sequence.owner.sequences:
                choice.order = (sequence.owner.request.priority, 0, self._admissions, choice.choice)
        else:
            self.queue.remove(sequence)
        admission = self._cache.admit(sequence.owner.request.salt, sequence.packed, match)
        self._on_admit(sequence, match.num_tokens)
        self._last_sequence_id += 1
        sequence.table = admission.table
        sequence.sequence_id = self._last_sequence_id
        sequence.hint = None
        sequence.shared_tokens.clear()
        insort(self.running, sequence, key=_order)
        if admission.copy is not None:
            step.copies.append(admission.copy)
        self._add_chunk(step, sequence, admission.table, first=True)

    def _match(self, sequence: SequenceState) -> Match:
        match = self._cache.match(sequence.owner.request.salt, sequence.packed, sequence.num_tokens - 1, sequence.hint)
        sequence.hint = match.node
        return match

    def _hit_pages(self, sequence: SequenceState) -> int:
        node = self._cache.match_pages(
            sequence.owner.request.salt, sequence.packed, sequence.num_tokens - 1, sequence.hint
        )
        sequence.hint = node
        return node.depth if node is not None else 0

    def _table(self, sequence: SequenceState) -> BlockTable:
        if sequence.table is None:
            raise ValueError(f"choice {sequence.choice} of {sequence.owner.request.request_id!r} is not running")
        return sequence.table
