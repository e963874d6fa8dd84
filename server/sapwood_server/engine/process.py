"""The life of the engine process: its start, its loop, and every way it ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

import msgspec

from sapwood_server.config import ServerConfig
from sapwood_server.engine.channel import EngineChannel
from sapwood_server.engine.loop import Engine, EngineLoop
from sapwood_server.errors import StartupError
from sapwood_server.quoting import reason_of
from sapwood_server.values.messages import Failed, Loading, Ready

Progress = Callable[[str, float], None]
"""Called with a stage's name and how much of it is done, in [0, 1]."""

BuildEngine = Callable[[ServerConfig, Progress], Engine]

_logger = logging.getLogger(__name__)

_STDIN = 0
_USAGE = "usage: python -m sapwood_server.engine ENDPOINT (with the configuration as one line of JSON on stdin)"


def main(argv: list[str], build: BuildEngine) -> int:
    """Run an engine process and return its exit code: 0 after a shutdown, 1 if it can't start or can't go on.

    `argv[1]` is the endpoint to connect to. The configuration is one line of JSON on stdin, and stdin then stays open:
    its end of file means that the parent is gone, and ends this process too, whatever it does at that moment.
    """
    if len(argv) != 2:
        raise SystemExit(_USAGE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server, and the server decides
    config = msgspec.json.decode(_read_line(), type=ServerConfig)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s engine: %(message)s")
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    channel = EngineChannel(argv[1])
    try:
        return _serve(channel, config, build)
    finally:
        channel.close()


def _serve(channel: EngineChannel, config: ServerConfig, build: BuildEngine) -> int:
    try:
        engine = build(config, lambda stage, fraction: channel.send(Loading(stage, fraction)))
        loop = EngineLoop(channel, engine)
        _stop_on_sigterm(loop)
        channel.send(Ready(engine.runner.info))
        loop.run()
    except StartupError as error:
        channel.send(Failed(str(error)))
        return 1
    except Exception as error:
        _logger.exception("the engine can't go on")
        channel.send(Failed(f"{type(error).__name__}: {reason_of(error)}"))
        return 1
    return 0


def _stop_on_sigterm(loop: EngineLoop) -> None:
    def handle(_signal: int, _frame: FrameType | None) -> None:
        loop.stop()

    signal.signal(signal.SIGTERM, handle)


def _read_line() -> bytes:
    """The first line of stdin, read past Python's buffer: the watching thread must not hold that buffer's lock when
    the interpreter ends."""
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(_STDIN, 65_536)
        if not chunk:
            raise SystemExit(_USAGE)
        line += chunk
    return bytes(line)


def _exit_with_parent() -> None:
    while os.read(_STDIN, 65_536):
        pass
    os._exit(1)  # at once: nobody is left to read a result, and the main thread may be deep in a long computation
