"""Everything the routes need, put together once by the composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import Request

from sapwood_server.api.auth import KeyRing
from sapwood_server.api.engine import EngineSlot
from sapwood_server.api.metrics import Metrics
from sapwood_server.api.prompt_threads import PromptThreads
from sapwood_server.chat.prompt import PromptEncoder
from sapwood_server.chat.token_text import TokenTexts


@dataclass(frozen=True, kw_only=True)
class Service:
    """One model, served. Held by the app; there are no globals."""

    model_names: tuple[str, ...]
    """The names that requests may use; the first is the model's own or the first that was given."""
    created: int
    """Unix seconds of the start: the models' `created`."""
    engine: EngineSlot
    prompts: PromptEncoder
    tokens: TokenTexts
    keys: KeyRing
    metrics: Metrics
    draw_seed: Callable[[], int]
    """A fresh unsigned 64-bit seed for a request that brings none."""
    strict_max_tokens: bool = False
    enable_test_hooks: bool = False
    max_body_bytes: int = 8 * 2**20
    """Some ten times what a prompt of 128k tokens takes as JSON."""
    prompt_threads: PromptThreads = field(default_factory=PromptThreads)
    heartbeat_seconds: float = 10.0
    """A stream in which nothing flows for so long gets a comment, so that no proxy gives it up."""


def service_of(request: Request) -> Service:
    """The service of the app that this request came to."""
    service: Service = request.app.state.service
    return service
