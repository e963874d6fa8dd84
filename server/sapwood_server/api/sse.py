"""Server-sent events: one response whose chunks come as the engine makes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sapwood_server.api.disconnect import ClientGone, wait_for_disconnect
from sapwood_server.errors import ApiError, InternalError

_log = logging.getLogger(__name__)

_HEARTBEAT = b": keep-alive\n\n"


def event(data: bytes) -> bytes:
    """One event without a name."""
    return b"data: " + data + b"\n\n"


DONE = event(b"[DONE]")


class EventStream(Response):
    """Sends `chunks`, each one or more whole events.

    The status line waits for the first chunk, so that a failure before it is an answer with a status of its own (it is
    raised from here, for the app's error handlers), or for the first heartbeat. An error after that is sent as one
    last event. When the client goes away, `chunks` is closed at once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        *,
        heartbeat_seconds: float,
        error_event: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._chunks = chunks
        self._heartbeat_seconds = heartbeat_seconds
        self._error_event = error_event
        self._lock = asyncio.Lock()
        self._started = False
        self._clock = asyncio.get_running_loop().time
        self._last_sent = self._clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the stream to its end, or to the client's."""
        pump = asyncio.ensure_future(self._pump(send))
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            while not pump.done() and not leaving.done():
                idle = self._clock() - self._last_sent
                wait = max(self._heartbeat_seconds - idle, 0.0)
                await asyncio.wait({pump, leaving}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                if self._clock() - self._last_sent >= self._heartbeat_seconds and not pump.done():
                    await self._send(send, _HEARTBEAT)
            if not pump.done():
                raise ClientGone
            pump.result()
        finally:
            pump.cancel()
            leaving.cancel()
            await asyncio.gather(pump, leaving, return_exceptions=True)
            await self._chunks.aclose()

    async def _pump(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                await self._send(send, chunk)
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, ApiError):
                _log.exception("a stream failed")
                error = InternalError("the server failed on this request")
            await self._send(send, self._error_event(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._last_sent = self._clock()
