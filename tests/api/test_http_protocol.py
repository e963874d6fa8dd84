"""What is no HTTP, and what never becomes a whole request."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from sapwood_server.api.http_protocol import HttpProtocol
from sapwood_server.values.events import Event
from sapwood_server.values.request import Request
from support.api_client import JsonObject, data_of
from support.api_service import MODEL, ScriptedEngine, final, make_service, running, says, tokens

PATIENCE_SECONDS = 30.0
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "x"}).encode()


class Hasty(HttpProtocol):
    """Waits a twentieth of a second."""

    header_seconds = 0.05
    body_seconds = 0.05


@pytest.fixture(name="url", scope="module")
def url_fixture() -> Iterator[str]:
    with running(make_service(ScriptedEngine(says("ok")))) as url:
        yield url


@pytest.fixture(name="hasty")
def hasty_fixture() -> Iterator[str]:
    with running(make_service(ScriptedEngine(says("ok"))), protocol=Hasty) as url:
        yield url


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)


def read_to_the_end(connection: socket.socket) -> bytes:
    """All that the server sends before it closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65_536):
            received += data
    return received


def trickle(connection: socket.socket) -> bytes:
    """Sends a byte now and then until the server has closed the connection; what that sent before."""
    connection.settimeout(0.005)
    received = b""
    try:
        for _ in range(10_000):  # far from the longest header
            connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                data = connection.recv(65_536)
                received += data
                if not data:
                    return received
    except ConnectionError:
        return received
    raise AssertionError("ten thousand bytes were waited for")


def refusal(received: bytes, status: int) -> JsonObject:
    """The error object of a refusal after which the connection is closed."""
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0].split()[1] == str(status), received
    assert "content-type: application/json" in lines
    assert "connection: close" in lines
    assert f"content-length: {len(body)}" in lines
    error: JsonObject = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 200_000 + b"\r\n\r\n",
        POST + b"Content-Length: many\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nnot a size\r\n",
    ],
    ids=["TLS", "words", "no host", "no colon", "long header", "length", "chunk"],
)
def test_what_is_no_http_gets_the_error_object(url: str, sent: bytes) -> None:
    with connect(url) as connection:
        connection.sendall(sent)
        assert refusal(read_to_the_end(connection), 400)["code"] == "invalid_http"


def test_headers_may_have_64_kilobytes(url: str) -> None:
    line = b"X-Long: " + b"x" * 1014 + b"\r\n"
    with connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + 60 * line)
        connection.sendall(b"\r\n")
        assert read_to_the_end(connection).startswith(b"HTTP/1.1 200 ")
    with connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + 70 * line)  # and more may follow
        assert "over 65536 bytes" in refusal(read_to_the_end(connection), 400)["message"]


def test_an_upgrade_is_not_taken_up(url: str) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x"}
    assert httpx.get(f"{url}/health", headers=headers).status_code == 200


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "], ids=["a letter", "half a header"])
def test_headers_that_never_end_are_given_up(hasty: str, sent: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(sent)
        assert refusal(read_to_the_end(connection), 408)["code"] == "request_timeout"


def test_a_body_that_never_ends_is_given_up(hasty: str) -> None:
    with connect(hasty) as connection:
        connection.sendall(POST + b'Content-Length: 1000\r\n\r\n{"model":')
        assert refusal(read_to_the_end(connection), 408)["code"] == "request_timeout"


def test_a_connection_that_says_nothing_is_closed_without_a_word(hasty: str) -> None:
    with connect(hasty) as connection:
        assert read_to_the_end(connection) == b""


def test_the_second_request_of_a_connection_has_its_time_too(hasty: str) -> None:
    with connect(hasty) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + b"GET / HT")
        received = read_to_the_end(connection)
    first, _, second = received.partition(b"}HTTP/1.1 ")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"408 ")


def test_a_body_that_is_still_sent_after_its_refusal_is_given_up(hasty: str) -> None:
    with connect(hasty) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx")
        assert b" 404 " in connection.recv(65_536)
        trickle(connection)


def test_trickling_does_not_help(hasty: str) -> None:
    with connect(hasty) as connection:
        assert refusal(trickle(connection), 408)["code"] == "request_timeout"


def test_an_answer_may_take_longer_than_a_request() -> None:
    go_on = threading.Event()

    def script(request: Request) -> Iterator[Event | threading.Event]:
        yield tokens(request, b"a")
        yield go_on
        yield tokens(request, b"b")
        yield final(request, completion=2)

    with (
        running(make_service(ScriptedEngine(script)), protocol=Hasty) as url,
        httpx.stream("POST", f"{url}/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}) as response,
    ):
        pieces = response.iter_text()
        text = next(pieces)
        with connect(url) as other:
            read_to_the_end(other)  # began later, and its time is up
        go_on.set()
        text += "".join(pieces)
    assert data_of(text)[-1] == "[DONE]"
