"""The messages on the socket between the API process and the engine process (msgpack, tagged)."""

from __future__ import annotations

import msgspec

from sapwood_server.values.events import FinalEvent, TokenEvent
from sapwood_server.values.request import Request


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start this request."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End this request within a step; unknown ids are ignored (it may just have ended)."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Cancel what runs, send its final events, then exit with code 0."""


ToEngine = Submit | Cancel | Shutdown


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine decided at start; shown by `/version` and in the log."""

    model: str
    architecture: str
    fingerprint: str
    """Hash of everything that changes KV bits: weights' identity, dtype, layout."""
    device: str
    dtype: str
    dtype_reason: str
    deterministic: bool
    """Whether logits are the same bits however a request is chunked, batched, cached or preempted."""
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    """Page 0, which is reserved, included."""
    kv_bytes_per_token: int
    max_batched_tokens: int
    max_num_seqs: int
    weight_bytes: int
    load_seconds: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine's start, and the state now. Sent with every step and once a second when idle."""

    requests_running: int = 0
    requests_waiting: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    """In the tree and referenced by no running request."""
    pages_active: int = 0
    steps: int = 0
    preemptions: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    recomputed_tokens: int = 0
    generation_tokens: int = 0


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of the start-up; `fraction` is in [0, 1]."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests from now on."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start, or cannot go on, and exits. `message` is one line for a person."""

    message: str


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time of one step, by part."""

    schedule: float
    """Planning the step, and taking its result."""
    forward: float
    sample: float


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The events of one step, in order."""

    events: tuple[TokenEvent | FinalEvent, ...]
    stats: EngineStats
    step_seconds: StepSeconds | None = None
    """None when no step ran, or it failed."""


FromEngine = Loading | Ready | Failed | StepOutput
