"""The outermost layer: request ids, the access log, the count of requests, and the last resort for errors."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sapwood_server.api.disconnect import ClientGone
from sapwood_server.api.handlers import error_response
from sapwood_server.api.metrics import Metrics
from sapwood_server.errors import InternalError

_log = logging.getLogger(__name__)
_access_log = logging.getLogger("sapwood_server.access")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
CLIENT_GONE = 499
"""The status, of logs and metrics only, of a request whose client left before its answer."""


class RequestLayer:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other kinds of traffic pass untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"]
        if method == "HEAD":
            scope = {**scope, "method": "GET"}  # the same answer (RFC 9110, 9.3.2); uvicorn leaves out its body
        request_id = _request_id(Headers(scope=scope))
        start = time.perf_counter()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            status = status or CLIENT_GONE
        except Exception:  # noqa: BLE001 - logged; a bug in one request must not take the connection's others along
            _log.exception("request %s failed", request_id)
            if status is None:
                await error_response(InternalError("the server failed on this request"))(scope, receive, send_with_id)
        path = _route_path(scope)
        self._metrics.count_http(path, status or CLIENT_GONE)
        seconds = time.perf_counter() - start
        _access_log.info("%s %s %s %.3fs id=%s", method, path, status, seconds, request_id)


def _request_id(headers: Headers) -> str:
    """The client's own id if it is short and printable, else a fresh one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _route_path(scope: Scope) -> str:
    """The matched route's path: the client's could be anything, and labels must be few."""
    return getattr(scope.get("route"), "path", "unmatched")
