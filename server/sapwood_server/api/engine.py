"""The engine as routes see it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from sapwood_server.errors import UnavailableError
from sapwood_server.values.events import Event
from sapwood_server.values.messages import EngineInfo, EngineStats
from sapwood_server.values.request import Request


class Engine(Protocol):
    """What `EngineClient` offers, and the part of it that routes use."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def ready(self) -> bool: ...

    @property
    def failure(self) -> str | None: ...

    @property
    def stats(self) -> EngineStats: ...

    def stream(self, request: Request) -> AsyncGenerator[Event, None]: ...


class EngineSlot:
    """Where the engine will be once it has loaded: the server answers `/health` before that."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def require(self) -> Engine:
        """The engine, ready for requests. Raises UnavailableError while it loads, restarts, or is gone."""
        if self.engine is None:
            raise UnavailableError("the model is loading; try again shortly", code="loading")
        if not self.engine.ready:
            reason = self.engine.failure or "it is restarting; try again shortly"
            raise UnavailableError(f"the engine takes no requests: {reason}", code="engine_unavailable")
        return self.engine
