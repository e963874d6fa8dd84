"""One engine process: its command, its socket and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from sapwood_server.config import ServerConfig, engine_environment
from sapwood_server.errors import StartupError
from sapwood_server.quoting import LINE_CHARACTERS, quote
from sapwood_server.values.messages import FromEngine, ToEngine

ENGINE_COMMAND = (sys.executable, "-m", "sapwood_server.engine")

_STDERR = 2
_DRAIN_SECONDS = 0.5
"""How long a dead engine's socket must be silent before it counts as read to its end."""


class SocketDirectory:
    """A fresh directory that only this user can enter, for the sockets of one server's engine processes."""

    def __init__(self) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="sapwood-"))
        self._count = 0

    def next_endpoint(self) -> str:
        """An endpoint never handed out before, so that no message of a dead engine can reach its successor.

        Raises StartupError if the system's temporary directory has too long a name for a socket.
        """
        self._count += 1
        path = str(self._path / f"engine-{self._count}")
        if len(path.encode()) > zmq.IPC_PATH_MAX_LEN:
            shown = quote(path, LINE_CHARACTERS)
            raise StartupError(
                f"the socket's path {shown} is longer than {zmq.IPC_PATH_MAX_LEN} bytes; set TMPDIR to a shorter one"
            )
        return f"ipc://{path}"

    def remove(self) -> None:
        """Remove it with all its sockets."""
        shutil.rmtree(self._path, ignore_errors=True)


class EngineProcess:
    """A running engine process. `release` it once it has ended."""

    def __init__(self, process: Process, socket: zmq.asyncio.Socket) -> None:
        self._process = process
        self._socket = socket
        self._exited = asyncio.create_task(process.wait())
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    @classmethod
    async def spawn(
        cls, command: tuple[str, ...], config: ServerConfig, context: zmq.asyncio.Context, endpoint: str
    ) -> EngineProcess:
        """Start `command` with the endpoint as its last argument and the configuration, without API keys, on stdin.

        It runs in a session of its own, so that Ctrl-C on a terminal reaches the server alone. Its output goes to the
        server's stderr. Raises StartupError if the command can't be run.
        """
        socket = context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.bind(endpoint)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                endpoint,
                stdin=PIPE,
                stdout=_STDERR,
                start_new_session=True,
                env=engine_environment(config),
            )
        except OSError as error:
            socket.close(linger=0)
            raise StartupError(f"can't run the engine with {quote(command[0], LINE_CHARACTERS)}: {error}") from error
        engine = cls(process, socket)
        engine._stdin.write(msgspec.json.encode(dataclasses.replace(config, api_key=())) + b"\n")
        return engine

    @property
    def _stdin(self) -> asyncio.StreamWriter:
        if self._process.stdin is None:
            raise RuntimeError("the engine process was spawned without a pipe on stdin")
        return self._process.stdin

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue the message; returns at once. What is sent to a dead engine is lost."""
        sent = asyncio.ensure_future(self._socket.send(self._encoder.encode(message), zmq.NOBLOCK))
        if not isinstance(sent.exception(), zmq.Again):  # no peer: it died
            sent.result()

    async def messages(self) -> AsyncIterator[FromEngine]:
        """What the engine says, until its process has ended and everything it sent is read."""
        while True:
            arrival = asyncio.ensure_future(self._socket.recv())
            await asyncio.wait({arrival, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if not arrival.done():
                await asyncio.wait({arrival}, timeout=_DRAIN_SECONDS)
            if not arrival.done():
                arrival.cancel()
                return
            yield self._decoder.decode(arrival.result())

    async def release(self) -> str:
        """Wait for its end, free its socket, and say how it ended: "exit code 1" or "signal 9 (SIGKILL)"."""
        code = await self._exited
        self._socket.close(linger=0)
        self._stdin.close()
        return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._exited.done()

    async def wait(self, timeout_seconds: float | None) -> None:
        """Wait until it has ended or the time is up; None waits for good."""
        await asyncio.wait({self._exited}, timeout=timeout_seconds)

    def terminate(self) -> None:
        """Send SIGTERM: an engine that serves cancels what runs and exits."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
