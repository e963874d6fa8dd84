"""The ASGI application."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from sapwood_server.api import handlers, openapi, routes_chat, routes_completions, routes_models, routes_status
from sapwood_server.api.chat_writer import ChatCompletion, Chunk
from sapwood_server.api.completion_writer import Completion
from sapwood_server.api.handlers import ErrorBody
from sapwood_server.api.middleware import RequestLayer
from sapwood_server.api.service import Service
from sapwood_server.api.wire_chat import ChatBody
from sapwood_server.api.wire_completions import CompletionBody


def create_app(service: Service) -> FastAPI:
    """An app that serves this service; several can live in one process."""
    app = FastAPI(
        title="Sapwood", version=version("sapwood"), redirect_slashes=False, responses=openapi.errors(ErrorBody)
    )
    app.state.service = service
    for routes in (routes_chat, routes_completions, routes_models, routes_status):
        app.include_router(routes.router)
    handlers.install(app)
    openapi.install(app, (ChatBody, CompletionBody, ChatCompletion, Chunk, Completion, ErrorBody))
    app.add_middleware(RequestLayer, metrics=service.metrics)
    return app
