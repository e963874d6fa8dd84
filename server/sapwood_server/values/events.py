"""What the engine tells the API process about a request."""

from __future__ import annotations

import enum

import msgspec

from sapwood_server.values.plan import TokenLogprob


class FinishReason(enum.Enum):
    """Why one choice ended. CANCELLED and ERROR never reach a client as a `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, tag="token"):
    """New tokens of one choice, and the bytes that are now certain to be part of its text."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    """Every sampled id in order, the end token and those of a stop string included. May be empty."""
    data: bytes = b""
    """Text bytes released by these tokens: what could still become a stop string is held back until it can't, control
    tokens have none. Concatenated over a choice's events this is its whole text; UTF-8 may be split anywhere."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token id if logprobs were asked for."""
    finish_reason: FinishReason | None = None
    """Set on the choice's last event."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts and times of one request. The prompt is counted once, whatever `n` is."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Of the prompt, found in the cache at first admission; recomputing after a preemption does not change it."""
    completion_tokens: int = 0
    """Sampled tokens, summed over choices."""
    computed_tokens: int = 0
    """Prompt tokens that went through the model: prompt - cached."""
    recomputed_tokens: int = 0
    """Tokens computed again after a preemption."""
    preemptions: int = 0
    queue_seconds: float = 0.0
    """Arrival to first admission."""
    prefill_seconds: float = 0.0
    """First admission to first token."""


class FinalEvent(msgspec.Struct, frozen=True, kw_only=True, tag="final"):
    """The one last event of a request: nothing follows it."""

    request_id: str
    usage: Usage
    error: str | None = None
    """What went wrong in the engine, in a sentence; None if every choice ended by itself or was cancelled."""
    cancelled: bool = False


Event = TokenEvent | FinalEvent
