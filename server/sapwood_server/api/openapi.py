"""The OpenAPI document's part on bodies, which FastAPI does not parse itself."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

_REF = "#/components/schemas/{name}"


def json_body(body: type[msgspec.Struct]) -> dict[str, Any]:
    """A route's `openapi_extra` for this wire type."""
    schema = {"$ref": _REF.format(name=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, bodies: tuple[type[msgspec.Struct], ...]) -> None:
    """Add the schemas of these wire types to the app's document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        _, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
