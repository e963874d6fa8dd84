"""`GET /health`, `/ready`, `/version` and `/metrics`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from sapwood_server.api.auth import authenticate
from sapwood_server.api.service import service_of
from sapwood_server.values.messages import EngineStats

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """200 as long as the process answers, also while the model loads."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """200 when requests are taken; 503 while the engine loads, restarts, or is gone."""
    service_of(request).engine.require()
    return {"status": "ready"}


@router.get("/version")
async def show_version(request: Request) -> dict[str, Any]:
    """The server's version and, once it is loaded, what the engine decided at its start."""
    engine = service_of(request).engine.engine
    return {"version": version("sapwood"), "engine": msgspec.to_builtins(engine.info) if engine else None}


@router.get("/metrics", dependencies=[Depends(authenticate)])
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    service = service_of(request)
    stats = service.engine.engine.stats if service.engine.engine else EngineStats()
    return Response(service.metrics.exposition(stats), media_type=CONTENT_TYPE_LATEST)
