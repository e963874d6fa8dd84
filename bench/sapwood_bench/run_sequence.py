"""A sequence that a bench runs through a runner, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sapwood_server.values.plan import Phase, RowPlan, SampleSpec
from sapwood_server.values.sampling import SamplingParams


@dataclass
class RunSequence:
    """Tokens written so far, in consecutive pages from `first_page` on."""

    sequence_id: int
    first_page: int
    page_size: int
    num_written: int = 0

    def row(self, token_ids: Sequence[int], phase: Phase) -> RowPlan:
        """The next tokens; greedy sampling after the last."""
        start, size = self.num_written, self.page_size
        self.num_written += len(token_ids)
        sample = SampleSpec(
            choice_key=self.sequence_id,
            choice=0,
            sampling=SamplingParams(temperature=0.0),
            prompt_ids=(),
            output_ids=(),
        )
        return RowPlan(
            sequence_id=self.sequence_id,
            token_ids=token_ids,
            start=start,
            phase=phase,
            new_pages=range(self.first_page + -(-start // size), self.first_page + -(-self.num_written // size)),
            samples=(sample,),
        )
