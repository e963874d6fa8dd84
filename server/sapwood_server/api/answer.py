"""Answers a job, whole or as a stream."""

from __future__ import annotations

import msgspec
from fastapi import Request
from starlette.responses import Response

from sapwood_server.api.disconnect import unless_gone
from sapwood_server.api.generation import Generation
from sapwood_server.api.handlers import error_body
from sapwood_server.api.job import Job
from sapwood_server.api.metrics import RequestTimer
from sapwood_server.api.service import Service
from sapwood_server.api.sse import EventStream, event
from sapwood_server.api.writer import Writer, write_stream, write_whole
from sapwood_server.errors import ApiError


async def answer(request: Request, service: Service, job: Job, writer: Writer, timer: RequestTimer) -> Response:
    """The response. If the client goes away the job is cancelled, in either form.

    Raises UnavailableError if the engine takes no requests, InternalError if it fails before anything was sent.
    """
    generation = Generation(service.engine, job.requests, timer)
    if job.stream:
        return EventStream(
            write_stream(job, generation, writer),
            job.headers,
            heartbeat_seconds=service.heartbeat_seconds,
            error_event=_error_event,
        )
    data = await unless_gone(request.receive, write_whole(generation, writer))
    return Response(data, media_type="application/json", headers=job.headers)


def _error_event(error: ApiError) -> bytes:
    return event(msgspec.json.encode(error_body(error)))
