"""The engine's end of the socket to the API process."""

from __future__ import annotations

import msgspec
import zmq

from sapwood_server.values.messages import FromEngine, ToEngine

_LINGER_MILLISECONDS = 2_000
"""How long `close` waits for the last messages to leave: ample for a live peer, bounded for one that hangs."""


class EngineChannel:
    """Typed messages over one DEALER socket.

    Neither direction has a high-water mark: a message is never dropped, and an API process that reads slowly can't hold
    up a step. What may pile up is bounded by the tokens of the requests that this API process has sent.
    """

    def __init__(self, endpoint: str) -> None:
        """Connect to `endpoint`, for example `ipc:///tmp/sapwood-x/engine-1`; the API process has bound it."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)

    def send(self, message: FromEngine) -> None:
        """Queue the message; returns at once."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self, timeout_seconds: float) -> ToEngine | None:
        """The next message, or None when none has come within the time; 0 does not wait.

        Raises msgspec.ValidationError for bytes that are no message, which means that the two ends are of different
        versions.
        """
        if not self._socket.poll(int(timeout_seconds * 1_000)):
            return None
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Send what is queued, within a bounded time, and release the socket."""
        self._socket.close(linger=_LINGER_MILLISECONDS)
        self._context.term()
