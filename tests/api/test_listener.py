"""The listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from sapwood_server.api.app import create_app
from sapwood_server.api.listener import HttpServer, bind, url_of
from sapwood_server.errors import StartupError
from sapwood_server.values.events import Event, FinalEvent, Usage
from sapwood_server.values.request import Request
from support.api_client import data_of
from support.api_service import MODEL, ScriptedEngine, make_service, tokens


def test_a_free_port_and_its_url() -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_an_ipv6_url_has_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listener = bind("::1", 0)
    except StartupError:
        pytest.skip("this machine has no IPv6 loopback")
    with contextlib.closing(listener):
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no.such.host.invalid", 0)])
def test_an_address_that_is_not_ours_is_refused(host: str, port: int) -> None:
    with pytest.raises(StartupError, match=host):
        bind(host, port)


def test_small_writes_do_not_wait_for_acknowledgements() -> None:
    async def is_nodelay() -> bool:
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def on_client(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            answered.set_result(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(on_client, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            result = await answered
            writer.close()
            await writer.wait_closed()
        return result

    assert asyncio.run(is_nodelay())


@pytest.mark.parametrize(("before", "stops"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)], ids=["", "nohup"])
def test_a_hangup_stops_the_server_unless_it_was_started_to_outlive_one(before: signal.Handlers, stops: bool) -> None:
    async def hang_up() -> bool:
        async def end_requests() -> None:
            pass

        server = HttpServer(create_app(make_service(None)), end_requests)
        with server.capture_signals():
            signal.raise_signal(signal.SIGHUP)
            for _ in range(100):  # turns of the loop, one of which hears of the signal
                await asyncio.sleep(0)
        return server.should_exit

    original = signal.signal(signal.SIGHUP, before)
    try:
        assert asyncio.run(hang_up()) is stops
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, original)


def test_a_stream_that_outlasts_the_servers_stop_ends_with_an_error_event() -> None:
    engine_closed = threading.Event()

    def script(request: Request) -> Iterator[Event | threading.Event]:
        yield tokens(request, b"a")
        yield engine_closed
        yield FinalEvent(request_id=request.request_id, usage=Usage(prompt_tokens=1), cancelled=True)

    async def close_engine() -> None:
        engine_closed.set()

    async def read_while_it_stops() -> str:
        server = HttpServer(create_app(make_service(ScriptedEngine(script))), close_engine, drain_seconds=0.05)
        listener = bind("127.0.0.1", 0)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        text = ""
        body = {"model": MODEL, "prompt": "x", "stream": True}
        async with (
            httpx.AsyncClient(base_url=url_of(listener)) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for piece in response.aiter_text():
                if not text:
                    signal.raise_signal(signal.SIGTERM)
                text += piece
        await serving
        return text

    first, last = data_of(asyncio.run(read_while_it_stops()))
    assert json.loads(first)["choices"][0]["text"] == "a"
    assert json.loads(last)["error"]["code"] == "cancelled"
