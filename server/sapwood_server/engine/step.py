"""One step while it is being planned."""

from __future__ import annotations

from collections.abc import Sequence

from sapwood_server.engine.sequence import SequenceState
from sapwood_server.values.plan import PageCopy, Phase, RowPlan, SampleSpec, StepPlan


class StepBuilder:
    """Rows and copies of step `number`, and how many tokens it still has room for."""

    def __init__(self, number: int, max_batched_tokens: int) -> None:
        self.number = number
        self.tokens_left = max_batched_tokens
        self.rows: dict[SequenceState, RowPlan] = {}
        self.copies: list[PageCopy] = []
        self.num_preempted = 0

    def add_chunk(self, sequence: SequenceState, start: int, num_tokens: int, new_pages: Sequence[int]) -> None:
        """Plan positions `[start, start + num_tokens)` of a running sequence; if they are its last ones, also draw its
        next token, or, for the prefill of a request, the first token of each choice."""
        remaining = sequence.num_tokens - start
        if remaining == 1 and sequence.output_ids:
            self.add_decode(sequence, start, new_pages)
            return
        draws: tuple[SampleSpec, ...] = ()
        if num_tokens == remaining:
            draws = sequence.draws()
            if not sequence.output_ids and len(sequence.owner.sequences) > 1:
                draws = tuple(draw for choice in sequence.owner.sequences for draw in choice.draws())
        self.rows[sequence] = RowPlan(
            sequence_id=sequence.sequence_id,
            token_ids=sequence.token_ids(start, start + num_tokens),
            start=start,
            phase=Phase.PREFILL,
            new_pages=new_pages,
            samples=draws,
        )
        self.tokens_left -= num_tokens

    def add_decode(self, sequence: SequenceState, start: int, new_pages: Sequence[int]) -> None:
        """Plan the last token that was drawn, at position `start`. It is a decode row only if it was drawn in the step
        before this one: a sequence that had to stand aside meanwhile, or lost its pages, makes it as prefill."""
        self.rows[sequence] = RowPlan(
            sequence_id=sequence.sequence_id,
            token_ids=(sequence.output_ids[-1],),
            start=start,
            phase=Phase.DECODE if sequence.sampled_in_step == self.number - 1 else Phase.PREFILL,
            new_pages=new_pages,
            samples=sequence.draws(),
        )
        self.tokens_left -= 1

    def remove_row(self, sequence: SequenceState) -> None:
        """Take the sequence out of the step, if it is in."""
        row = self.rows.pop(sequence, None)
        if row is not None:
            self.tokens_left += len(row.token_ids)

    def build(self, released: Sequence[int], ended_choices: Sequence[int]) -> StepPlan:
        """`released`, `ended_choices`: sequence ids and choice keys that ended since the last plan."""
        return StepPlan(
            step=self.number,
            rows=tuple(self.rows.values()),
            copies=tuple(self.copies),
            released=tuple(released),
            ended_choices=tuple(ended_choices),
        )
