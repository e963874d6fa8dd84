"""Bodies that are no requests: not JSON, too large, too deep, of the wrong type."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import httpx
import pytest

from support.api_client import Api, error_of

ROUTES = ("/v1/chat/completions", "/v1/completions")


def post(api: Api, content: bytes, path: str = ROUTES[0], content_type: str = "application/json") -> httpx.Response:
    """These bytes as a body."""
    return api.client.post(path, content=content, headers={"Content-Type": content_type})


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"model": "scripted", "temperature": NaN}',
        b'{"model": "scripted", "temperature": Infinity}',
        b'{"model": "\xff\xfe"}',
        b'{"model": "\\ud800"}',
        b'{"model": "scripted", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["empty", "cut", "NaN", "Infinity", "not UTF-8", "half a surrogate pair", "deep"],
)
def test_what_is_no_json_is_refused(api: Api, path: str, content: bytes) -> None:
    assert error_of(post(api, content, path))["code"] == "invalid_json"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "content", [b"null", b"[]", b'"x"', b"5", b'{"model": 1e999}', b'{"n": 1' + b"0" * 5000 + b"}"]
)
def test_json_of_another_shape_is_refused(api: Api, path: str, content: bytes) -> None:
    assert error_of(post(api, content, path))["type"] == "invalid_request_error"


def test_missing_fields_are_named(api: Api) -> None:
    assert error_of(post(api, b"{}"))["param"] == "model"
    assert error_of(post(api, b'{"model": "scripted"}'))["param"] == "messages"
    assert error_of(post(api, b'{"model": "scripted"}', ROUTES[1]))["param"] == "prompt"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_another_content_type_is_a_415(api: Api, content_type: str) -> None:
    message = error_of(post(api, b"{}", content_type=content_type), 415)["message"]
    assert "application/json" in message


def test_a_charset_does_no_harm(api: Api) -> None:
    body = json.dumps({"model": "scripted", "prompt": "é"}).encode()
    assert post(api, body, ROUTES[1], "Application/JSON; charset=utf-8").status_code == 200


def test_ten_megabytes_are_a_413_and_the_server_keeps_serving(api: Api) -> None:
    body = json.dumps({"model": "scripted", "prompt": "x" * 10_000_000}).encode()
    error = error_of(post(api, body, ROUTES[1]), 413)
    assert str(8 * 2**20) in error["message"]
    assert api.complete().status_code == 200


def test_the_limit_is_exact(start: Callable[..., Api]) -> None:
    api = start(max_body_bytes=1000)
    body = json.dumps({"model": "scripted", "prompt": "x"}).encode()
    assert post(api, body + b" " * (1000 - len(body)), ROUTES[1]).status_code == 200
    error_of(post(api, body + b" " * (1001 - len(body)), ROUTES[1]), 413)


def test_a_body_far_over_the_limit_ends_the_connection(start: Callable[..., Api]) -> None:
    api = start(max_body_bytes=1000)
    pieces = iter([b" " * 100_000] * 500)
    with contextlib.suppress(httpx.TransportError):  # the server may close before it has read all of it
        error_of(api.client.post(ROUTES[0], content=pieces, headers={"Content-Type": "application/json"}), 413)
    assert list(pieces), "the client could not send all of it"
    assert api.complete().status_code == 200


def test_depth_that_json_allows_but_templates_do_not(api: Api) -> None:
    schema = b'{"a":' * 400 + b"{}" + b"}" * 400
    tool = b'[{"type": "function", "function": {"name": "f", "parameters": ' + schema + b"}}]"
    body = b'{"model": "scripted", "messages": [{"role": "user", "content": "x"}], "tools": ' + tool + b"}"
    assert post(api, body).status_code in (200, 400)
