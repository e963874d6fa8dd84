"""uvicorn's HTTP/1.1, with errors in our shape and a limit to how long a request may take to arrive."""

from __future__ import annotations

import asyncio
import enum
import http
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from sapwood_server.api.handlers import error_body
from sapwood_server.errors import ApiError, BadRequestError, RequestTimeoutError

MAX_HEADER_BYTES = 64 * 2**10
"""A request's line and headers in all, unless they arrive at once."""


class _Awaited(enum.Enum):
    """What the client has to send next."""

    NOTHING = enum.auto()
    HEADERS = enum.auto()
    BODY = enum.auto()


class HttpProtocol(H11Protocol):
    """One connection. A client that sends a byte now and then does not hold it for ever."""

    header_seconds = 20.0
    """From the connection, or a request's first byte, to the end of its headers."""
    body_seconds = 120.0
    """From there to the end of its body: at the largest body, 70 kB a second."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._awaited = _Awaited.NOTHING
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._set_deadline(_Awaited.NOTHING)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Called by uvicorn; the next request's first bytes may have been there for a while."""
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what h11 can't read; h11's own words are lost by then."""
        self._refuse(
            BadRequestError(
                f"the request is not valid HTTP/1.1, or its headers are over {MAX_HEADER_BYTES} bytes",
                code="invalid_http",
            )
        )

    def _watch(self) -> None:
        awaited = self._find_awaited()
        if awaited is not self._awaited:
            self._set_deadline(awaited)

    def _find_awaited(self) -> _Awaited:
        if self.transport.is_closing():
            return _Awaited.NOTHING
        if self.conn.their_state is h11.SEND_BODY:
            return _Awaited.BODY
        # Between two requests uvicorn's own, shorter, keep-alive limit holds.
        begun = self.cycle is None or self.conn.trailing_data[0]
        return _Awaited.HEADERS if self.conn.their_state is h11.IDLE and begun else _Awaited.NOTHING

    def _set_deadline(self, awaited: _Awaited) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited = awaited
        seconds = {_Awaited.HEADERS: self.header_seconds, _Awaited.BODY: self.body_seconds}.get(awaited)
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self._awaited is _Awaited.HEADERS and not self.conn.trailing_data[0]:
            self.transport.close()  # nobody has asked for anything
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its handler, which waits for the body, ends without an answer of its own
            self.cycle.message_event.set()
        part, seconds = "headers", self.header_seconds
        if self._awaited is _Awaited.BODY:
            part, seconds = "body", self.body_seconds
        self._refuse(
            RequestTimeoutError(
                f"the request's {part} did not arrive within {seconds:g} seconds", code="request_timeout"
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Answer with the error, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            data = msgspec.json.encode(error_body(error))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(data)).encode()),
                (b"connection", b"close"),
            ]
            reason = http.HTTPStatus(error.status).phrase.encode()
            response = h11.Response(status_code=error.status, headers=headers, reason=reason)
            events = (response, h11.Data(data=data), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
