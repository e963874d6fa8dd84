"""The listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from sapwood_server.api.listener import bind, url_of
from sapwood_server.errors import StartupError


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
