"""Runs the engine requests of one HTTP request and joins their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from sapwood_server.api.engine import Engine, EngineSlot
from sapwood_server.api.metrics import RequestTimer
from sapwood_server.chat.stream import ChoiceStream, Delta
from sapwood_server.errors import InternalError, UnavailableError
from sapwood_server.values.events import Event, FinalEvent, FinishReason, Usage
from sapwood_server.values.request import Request


class Generation:
    """One or more prompts with `n` choices each, as one sequence of deltas.

    Choices are numbered over all prompts: `prompt * n + choice`.
    """

    def __init__(self, slot: EngineSlot, requests: Sequence[Request], timer: RequestTimer) -> None:
        """Raises UnavailableError if the engine takes no requests now."""
        self._engine: Engine = slot.require()
        self._requests = requests
        self._timer = timer
        self._usages: list[Usage] = []

    @property
    def usage(self) -> Usage:
        """Summed over the prompts; whole once `deltas` has ended."""
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in self._usages),
            cached_tokens=sum(usage.cached_tokens for usage in self._usages),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages),
        )

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What each event adds, in the order the engine sent them. Closing it cancels what still runs.

        Raises InternalError if the engine fails on a request or dies under it, UnavailableError if the server stops.
        """
        streams = [ChoiceStream() for request in self._requests for _ in range(request.sampling.n)]
        self._timer.expect(len(streams))
        try:
            async with aclosing(self._events()) as events:
                async for offset, event in events:
                    if isinstance(event, FinalEvent):
                        self._finish(event)
                    else:
                        self._timer.observe_event(event)
                        yield streams[offset + event.choice].push(event, offset)
        except Exception:
            self._timer.observe_abort(FinishReason.ERROR)
            raise
        finally:
            self._timer.observe_abort(FinishReason.CANCELLED)

    def _finish(self, event: FinalEvent) -> None:
        if event.error is not None:
            raise InternalError(event.error, code="engine_error")
        if event.cancelled:
            raise UnavailableError("the request was cancelled by the server", code="cancelled")
        self._usages.append(event.usage)
        self._timer.observe_end(event.usage)

    async def _events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Events with their request's first choice number."""
        if len(self._requests) == 1:
            async with aclosing(self._engine.stream(self._requests[0])) as events:
                async for event in events:
                    yield 0, event
            return
        arrivals: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue()
        tasks = []
        offset = 0
        for request in self._requests:
            tasks.append(asyncio.create_task(self._forward(request, offset, arrivals)))
            offset += request.sampling.n
        open_requests = len(tasks)
        try:
            while open_requests:
                offset, arrival = await arrivals.get()
                if isinstance(arrival, BaseException):
                    raise arrival
                open_requests -= isinstance(arrival, FinalEvent)
                yield offset, arrival
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(
        self, request: Request, offset: int, arrivals: asyncio.Queue[tuple[int, Event | BaseException]]
    ) -> None:
        try:
            async with aclosing(self._engine.stream(request)) as events:
                async for event in events:
                    arrivals.put_nowait((offset, event))
        except Exception as error:
            arrivals.put_nowait((offset, error))
            raise
