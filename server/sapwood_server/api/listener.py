"""The HTTP server: a socket of ours, and uvicorn on it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from sapwood_server.api.http_protocol import MAX_HEADER_BYTES, HttpProtocol
from sapwood_server.errors import StartupError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DRAIN_SECONDS = 5.0
"""What running requests get to end by themselves when the server is told to stop; then they are ended."""
_SEND_SECONDS = 5
"""What is left after that to send their last words; then their connections are cut."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises StartupError if the address is taken or is none of ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off; else each small chunk waits for an ACK, some 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise StartupError(f"can't listen on {host} port {port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://host:port` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(
    app: ASGIApp, *, graceful_seconds: int, protocol: type[HttpProtocol] = HttpProtocol
) -> uvicorn.Config:
    """uvicorn's settings: our HTTP, no logging of its own, and no other protocol to upgrade to."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=graceful_seconds,
    )


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers and logging, which would end the process before the engine is closed."""

    def __init__(
        self, app: ASGIApp, end_requests: Callable[[], Awaitable[None]], *, drain_seconds: float = _DRAIN_SECONDS
    ) -> None:
        """`end_requests` is called when requests still run `drain_seconds` after the server was told to stop: each is
        to end with an error that its client can read, rather than with its connection."""
        self._end_requests = end_requests
        self._drain_seconds = drain_seconds
        super().__init__(server_config(app, graceful_seconds=math.ceil(drain_seconds) + _SEND_SECONDS))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new connections, and wait for the requests that run, within bounds."""
        stopping = asyncio.ensure_future(super().shutdown(sockets))
        await asyncio.wait({stopping}, timeout=self._drain_seconds)
        if not stopping.done():
            await self._end_requests()
        await stopping

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP ask the server to stop; after any of them, SIGINT does not wait for requests. What
        is ignored stays so: under `nohup`, SIGHUP."""
        loop = asyncio.get_running_loop()
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in heeded:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in heeded:
                loop.remove_signal_handler(number)
