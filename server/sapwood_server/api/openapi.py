"""The OpenAPI document's part on bodies, which FastAPI does not parse itself."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_EVENTS = "text/event-stream"

Responses = dict[int | str, dict[str, Any]]


def json_body(body: type[msgspec.Struct]) -> dict[str, Any]:
    """A route's `openapi_extra` for this wire type."""
    return {"requestBody": {"required": True, "content": {_JSON: _schema(body)}}}


def answers(whole: type[msgspec.Struct], chunk: type[msgspec.Struct]) -> Responses:
    """A route's `responses`: the whole answer, or a stream of chunks."""
    return {200: {"content": {_JSON: _schema(whole), _EVENTS: _schema(chunk)}}}


def errors(body: type[msgspec.Struct]) -> Responses:
    """The app's `responses`: what everything but a success is."""
    return {"default": {"description": "An error.", "content": {_JSON: _schema(body)}}}


def install(app: FastAPI, bodies: tuple[type[msgspec.Struct], ...]) -> None:
    """Add the schemas of these wire types to the app's document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _schema(body: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=body.__name__)}}
