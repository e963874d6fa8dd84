"""From the engine's events to deltas of text: what the client of one choice is sent, in either mode."""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_server.chat.detokenizer import Detokenizer
from sapwood_server.values.events import FinishReason, TokenEvent
from sapwood_server.values.plan import TokenLogprob

_REPORTED = frozenset({FinishReason.STOP, FinishReason.LENGTH})


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one event adds to one choice."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    """STOP or LENGTH on the choice's last delta; a choice that was cancelled or failed ends without one."""


class ChoiceStream:
    """One choice's events, in order, as deltas."""

    def __init__(self) -> None:
        self._detokenizer = Detokenizer()

    def push(self, event: TokenEvent, first_choice: int = 0) -> Delta:
        """The delta of this event. Its text may be empty: bytes can be held back, and control tokens have no text.

        `first_choice`: the number that choice 0 of the event's request has among all that are returned together.
        """
        return Delta(
            choice=first_choice + event.choice,
            text=self._detokenizer.push(event.data, last=event.finish_reason is not None),
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            finish_reason=event.finish_reason if event.finish_reason in _REPORTED else None,
        )
