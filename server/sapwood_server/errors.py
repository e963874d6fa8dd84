"""One exception per HTTP status that the server answers with, and one for a start that can't succeed."""

from __future__ import annotations


class SapwoodError(Exception):
    """Base of the errors that a person or a client is meant to read."""


class StartupError(SapwoodError):
    """The server can't start: one line that names the file, or the two numbers; the process exits with code 1."""


class EngineLostError(SapwoodError):
    """The engine died too often to be started again; the server ends with this line and exit code 1, so that whatever
    runs it can start it anew or report it."""


class ApiError(SapwoodError):
    """An answer that is not a success. `type`, `code` and `param` are those of OpenAI's error object."""

    status = 500
    type = "server_error"
    default_code: str | None = None

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param


class BadRequestError(ApiError):
    """400: the request itself is wrong. The message quotes the key, the value and what is accepted."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class AuthenticationError(ApiError):
    """401: no key, or one that the server does not know."""

    status = 401
    type = "authentication_error"


class NotFoundError(ApiError):
    """404: no such model or object (or one that belongs to another tenant)."""

    status = 404
    type = "invalid_request_error"


class MethodNotAllowedError(ApiError):
    """405: the route exists, but not for this method."""

    status = 405
    type = "invalid_request_error"


class RequestTimeoutError(ApiError):
    """408: the request did not arrive in time."""

    status = 408
    type = "invalid_request_error"


class PayloadTooLargeError(ApiError):
    """413: the body is over the size limit."""

    status = 413
    type = "invalid_request_error"


class UnsupportedMediaTypeError(ApiError):
    """415: the body is not declared as JSON."""

    status = 415
    type = "invalid_request_error"


class InternalError(ApiError):
    """500: the engine failed on this request, or died while it ran."""

    status = 500
    type = "server_error"


class UnavailableError(ApiError):
    """503: the engine is loading, restarting or gone; a client may try again."""

    status = 503
    type = "service_unavailable"
