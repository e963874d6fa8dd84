"""The requests that the engine has not finished, and the queues their events wait in."""

from __future__ import annotations

import asyncio
import logging

from sapwood_server.values.events import Event, FinalEvent, Usage
from sapwood_server.values.request import Request

_logger = logging.getLogger(__name__)


class OpenStream:
    """The events of one request, on their way to its consumer."""

    def __init__(self, request: Request) -> None:
        self.request_id = request.request_id
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.abandoned = False
        self._prompt_tokens = len(request.prompt_token_ids)
        self._completion_tokens = 0

    def put(self, event: Event) -> None:
        """Hand over an event, unless nobody is there to take it."""
        if self.abandoned:
            return
        if not isinstance(event, FinalEvent):
            self._completion_tokens += len(event.token_ids)
        self.events.put_nowait(event)

    def failure(self, message: str) -> FinalEvent:
        """The final event in place of the one that the engine can't send; its usage is what was delivered."""
        usage = Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._completion_tokens)
        return FinalEvent(request_id=self.request_id, usage=usage, error=message)


class StreamTable:
    """Open streams by request id. An id stays taken until its final event, also when its consumer has gone."""

    def __init__(self) -> None:
        self._streams: dict[str, OpenStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def check_free(self, request_id: str) -> None:
        """Raises ValueError if the id belongs to a request that has not ended."""
        if request_id in self._streams:
            raise ValueError(
                f"request_id {request_id!r} is taken by a request that has not ended; accepted: a fresh id"
            )

    def open(self, request: Request) -> OpenStream:
        """Raises ValueError if the request's id is taken."""
        self.check_free(request.request_id)
        stream = self._streams[request.request_id] = OpenStream(request)
        return stream

    def abandon(self, stream: OpenStream) -> bool:
        """Nobody reads this stream any more. True if the engine has not ended its request yet."""
        stream.abandoned = True
        return self._streams.get(stream.request_id) is stream

    def deliver(self, event: Event) -> None:
        """Hand an event of the engine to its stream, and close the stream with its final event."""
        stream = self._streams.get(event.request_id)
        if stream is None:
            _logger.error("the engine sent an event after the final one: %r", event)
            return
        if isinstance(event, FinalEvent):
            del self._streams[event.request_id]
        stream.put(event)

    def fail_all(self, message: str) -> None:
        """Close every open stream with an error."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(stream.failure(message))
