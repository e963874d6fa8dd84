"""A scripted engine behind a real HTTP server, for every test of the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from support.api_client import Api
from support.api_service import Script, ScriptedEngine, make_service, running, says


@pytest.fixture
def start() -> Iterator[Callable[..., Api]]:
    """`start(script, info={}, **settings)`: a server, ended with the test."""
    with ExitStack() as stack:

        def start_api(script: Script | None = None, info: dict[str, Any] | None = None, **settings: Any) -> Api:
            engine = ScriptedEngine(script or says("ok"), **(info or {}))
            url = stack.enter_context(running(make_service(engine, **settings)))
            return Api(engine, stack.enter_context(httpx.Client(base_url=url, timeout=30)))

        yield start_api


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    """One server for a module's refusals: its engine would say "ok"."""
    engine = ScriptedEngine(says("ok"))
    with running(make_service(engine)) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield Api(engine, client)
