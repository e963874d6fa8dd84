"""One step of the engine: what the scheduler orders, what the runner answers. In-process only, never on the wire."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from sapwood_server.values.sampling import SamplingParams


class Phase(enum.Enum):
    """DECODE: exactly one token, sampled or forced in the previous step. PREFILL: everything else (also a last chunk
    of one token, and recompute after a preemption)."""

    PREFILL = "prefill"
    DECODE = "decode"


class PageCopy(msgspec.Struct, frozen=True):
    """Copy slots `[0, num_slots)` of page `source` to page `target`, in every layer, before the step writes KV."""

    source: int
    target: int
    num_slots: int


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One draw from the logits at the last token of a row."""

    choice_key: int
    """Unique per (request, choice) over the life of the engine: the sampler may keep penalty counts under it."""
    choice: int
    sampling: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Live sequences owned by the scheduler; read during the step only. `len(output_ids)` is the output position."""
    forced: int | None = None
    """The id to return in place of the sampled one (its logprobs are still the model's)."""
    banned_ids: tuple[int, ...] = ()
    """Ids that must not be drawn now: end and stop ids while `min_tokens` is not reached."""


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Some consecutive tokens of one sequence, to be computed in this step."""

    sequence_id: int
    """Unique per admission: a sequence that was preempted returns under a new id, so a table always starts empty."""
    token_ids: Sequence[int]
    start: int
    """Absolute position of `token_ids[0]`; positions before it are already written in the sequence's pages."""
    phase: Phase
    new_pages: Sequence[int]
    """Page ids to append to this sequence's block table, which then covers `start + len(token_ids)` positions."""
    samples: tuple[SampleSpec, ...] = ()
    """Empty: logits are not needed. More than one: the prefill of a request with `n > 1`."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the runner does in one step, in order: drop `released`, do `copies`, compute `rows`."""

    step: int
    rows: tuple[RowPlan, ...]
    copies: tuple[PageCopy, ...] = ()
    released: tuple[int, ...] = ()
    """Sequence ids that ended or were preempted since the last plan; their block tables can be dropped."""
    ended_choices: tuple[int, ...] = ()
    """Choice keys that ended since the last plan; the sampler drops what it keeps for them."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's natural-log probability and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampled(msgspec.Struct, frozen=True):
    """One drawn (or forced) token."""

    token_id: int
    logprob: TokenLogprob | None = None


class DrawFailure(enum.Enum):
    """Why no token could be drawn. The values are for clients: they tell nothing of any request, this one's or
    another's."""

    NOT_FINITE = "the model gave logits that are not finite"
    NOTHING_LEFT = "logit_bias, penalties and min_tokens left no token that could be drawn"


class FailedDraw(msgspec.Struct, frozen=True):
    """In place of a token. It ends its request, and no other: the step's other draws are what they would be alone."""

    failure: DrawFailure


Draw = Sampled | FailedDraw


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """`samples[i][j]` answers `plan.rows[i].samples[j]`. Seconds are wall time inside the runner."""

    samples: tuple[tuple[Draw, ...], ...]
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
