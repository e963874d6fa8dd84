"""Reading a request's body: its size, its type, its fields."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from sapwood_server.api.disconnect import ClientGone
from sapwood_server.errors import ApiError, BadRequestError, PayloadTooLargeError, UnsupportedMediaTypeError
from sapwood_server.quoting import LINE_CHARACTERS, quote, reason_of, shorten

T = TypeVar("T")

_DRAINED_SIZES = 8
"""An oversized body is read and dropped up to so many times the limit: a client that is still writing when the
connection closes, as it does after that, may see a reset instead of the answer."""

_LOCATED = re.compile(r"^(?P<what>.*) - at `(?:key in )?\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<field>.*)`$", re.DOTALL)

_ACCEPTED_TAGS = {"role": "system, developer, user, assistant or tool", "type": "text"}


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises UnsupportedMediaTypeError unless it is JSON, PayloadTooLargeError over `limit` bytes,
    ClientGone if the client leaves in the middle of it."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaTypeError(
            f"the Content-Type is {quote(media_type or 'missing')}; accepted: 'application/json'",
            code="unsupported_media_type",
        )
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > limit * _DRAINED_SIZES:
                break
    except ClientDisconnect as error:
        raise ClientGone from error
    if size > limit:
        raise PayloadTooLargeError(f"the body is over this server's limit of {limit} bytes", code="body_too_large")
    return b"".join(parts)


def decode_body(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as its wire type. Raises BadRequestError that names the field."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    except msgspec.DecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {reason_of(error)}", code="invalid_json") from error
    except RecursionError as error:
        raise BadRequestError("the body is nested too deeply", code="invalid_json") from error


def _explain(message: str) -> ApiError:
    """msgspec's message in our words, with the path of the field as `param`."""
    located = _LOCATED.match(message)
    what, path = (located["what"], shorten(located["path"])) if located else (message, "")
    what = shorten(what, LINE_CHARACTERS)
    if unknown := _UNKNOWN_FIELD.match(what):
        field = _join(path, unknown["field"])
        return BadRequestError(
            f"unknown field: {quote(field)} is not one that this server knows", code="unknown_field", param=field
        )
    if missing := _MISSING_FIELD.match(what):
        field = _join(path, missing["field"])
        return BadRequestError(f"missing field: {quote(field)} is required", code="missing_field", param=field)
    if what.startswith("Invalid value") and path.rpartition(".")[2] in _ACCEPTED_TAGS:
        accepted = _ACCEPTED_TAGS[path.rpartition(".")[2]]
        value = what.removeprefix("Invalid value ")
        return BadRequestError(f"{path} is {value}; accepted: {accepted}", param=path)
    return BadRequestError(
        f"{path or 'the body'}: {what[:1].lower()}{what[1:]}", code="invalid_type", param=path or None
    )


def _join(path: str, field: str) -> str:
    return f"{path}.{shorten(field)}" if path else shorten(field)
