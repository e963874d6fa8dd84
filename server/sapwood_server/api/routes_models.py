"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from sapwood_server.api.auth import authenticate
from sapwood_server.api.job_builder import check_model
from sapwood_server.api.service import Service, service_of

router = APIRouter(dependencies=[Depends(authenticate)])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The model, under each of its names."""
    service = service_of(request)
    return {"object": "list", "data": [_describe(service, name) for name in service.model_names]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """One model by its name, which may contain slashes."""
    service = service_of(request)
    check_model(service, model)
    return _describe(service, model)


def _describe(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "sapwood",
        "max_model_len": service.engine.require().info.max_model_len,
    }
