"""The directory of sockets, and a command that can't be run."""

from __future__ import annotations

import asyncio
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio

from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.launcher import EngineProcess, SocketDirectory
from sapwood_server.errors import StartupError
from sapwood_server.values.messages import Failed, Loading


def test_directory_is_private_fresh_and_removable() -> None:
    directory, other = SocketDirectory(), SocketDirectory()
    first, second = Path(directory.next_endpoint().removeprefix("ipc://")), Path(directory.next_endpoint())
    assert first.name != second.name
    assert first.parent != Path(other.next_endpoint().removeprefix("ipc://")).parent
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    first.write_text("a socket")
    directory.remove()
    other.remove()
    assert not first.parent.exists()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    directory = SocketDirectory()
    with pytest.raises(StartupError, match="is longer than 107 bytes; set TMPDIR to a shorter one"):
        directory.next_endpoint()
    directory.remove()


def test_messages_are_read_to_their_end_after_the_process_has_died(tmp_path: Path) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        endpoint = f"ipc://{tmp_path}/s"
        engine = await EngineProcess.spawn(("true",), ServerConfig(), context, endpoint)
        await engine.wait(None)
        assert engine.ended
        peer = context.socket(zmq.DEALER)
        peer.connect(endpoint)
        messages = engine.messages()
        for message in (Loading("weights", 0.5), Failed("a reason")):
            peer.send(msgspec.msgpack.encode(message))  # it is still on its way when the reader looks
            assert await anext(messages) == message
        assert [message async for message in messages] == []
        assert await engine.release() == "exit code 0"
        context.destroy(linger=0)

    asyncio.run(scenario())


def test_a_command_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        with pytest.raises(StartupError, match="can't run the engine with '/no/such/python': "):
            await EngineProcess.spawn(("/no/such/python",), ServerConfig(), context, f"ipc://{tmp_path}/s")
        context.term()

    asyncio.run(scenario())


def test_an_engine_is_given_the_environment_of_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that ends with 0 iff Triton's variable is there."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = ("sh", "-c", 'test "$TRITON_INTERPRET" = 1')

    async def ending(device: str) -> str:
        context = zmq.asyncio.Context()
        engine = await EngineProcess.spawn(command, ServerConfig(device=device), context, f"ipc://{tmp_path}/{device}")
        ending = await engine.release()
        context.destroy(linger=0)
        return ending

    assert asyncio.run(ending("interpreter")) == "exit code 0"
    assert asyncio.run(ending("cpu")) == "exit code 1"
