"""A scripted engine behind a real HTTP server, for every test of the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from support.api_service import MODEL, Script, ScriptedEngine, make_service, running, says


class Api:
    """A client of a server whose engine follows a script."""

    def __init__(self, engine: ScriptedEngine, client: httpx.Client) -> None:
        self.engine = engine
        self.client = client

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        """A chat request with one user message, unless `messages` says otherwise."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        """A completion request."""
        return self.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    def metric(self, sample: str) -> float:
        """The value of one sample of /metrics, written as it is there; 0 if it is not."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(sample + " "):
                return float(line.rpartition(" ")[2])
        return 0.0


@pytest.fixture
def start() -> Iterator[Callable[..., Api]]:
    """`start(script, info={}, **settings)`: a server, ended with the test."""
    with ExitStack() as stack:

        def start_api(script: Script | None = None, info: dict[str, Any] | None = None, **settings: Any) -> Api:
            engine = ScriptedEngine(script or says("ok"), **(info or {}))
            url = stack.enter_context(running(make_service(engine, **settings)))
            return Api(engine, stack.enter_context(httpx.Client(base_url=url, timeout=30)))

        yield start_api
