"""Errors as OpenAI's error object, whatever raised them."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sapwood_server.errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    UnavailableError,
)
from sapwood_server.quoting import LINE_CHARACTERS, shorten


class ErrorObject(msgspec.Struct):
    """OpenAI's error object; `param` is the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every answer that is no success, and the last event of a stream that failed."""

    error: ErrorObject


def error_body(error: ApiError) -> ErrorBody:
    """The error as the client reads it."""
    return ErrorBody(ErrorObject(message=error.message, type=error.type, param=error.param, code=error.code))


def error_response(error: ApiError) -> Response:
    """The error as an HTTP response."""
    headers = {}
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, PayloadTooLargeError):
        headers["Connection"] = "close"  # else the rest of the body would be read, however long it is
    if isinstance(error, InternalError):
        # OpenAI's clients repeat any 5xx by themselves, but this request may be what broke the engine: once is enough.
        headers["X-Should-Retry"] = "false"
    if isinstance(error, UnavailableError):
        headers["Retry-After"] = "1"
    data = msgspec.json.encode(error_body(error))
    return Response(data, status_code=error.status, media_type="application/json", headers=headers)


def install(app: FastAPI) -> None:
    """Make the app answer errors through `error_response`."""
    app.exception_handler(ApiError)(_on_api_error)
    app.exception_handler(HTTPException)(_on_http_exception)
    app.exception_handler(RequestValidationError)(_on_validation_error)


async def _on_api_error(_request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """What the router itself raises: an unknown route, or a known one with another method."""
    path = shorten(request.url.path)
    if error.status_code == 404:
        return error_response(NotFoundError(f"there is no route {path}", code="unknown_route"))
    if error.status_code == 405:
        message = f"{path} does not accept {shorten(request.method)}"
        response = error_response(MethodNotAllowedError(message, code="method_not_allowed"))
        response.headers.update(error.headers or {})
        return response
    return error_response(BadRequestError(shorten(error.detail, LINE_CHARACTERS)))


async def _on_validation_error(_request: Request, error: RequestValidationError) -> Response:
    """A path or query parameter that FastAPI itself refused."""
    first = error.errors()[0]
    name = shorten(".".join(str(part) for part in first["loc"][1:]))
    return error_response(BadRequestError(f"{name}: {shorten(first['msg'], LINE_CHARACTERS)}", param=name))
