"""The HTTP side of an engine that dies: errors while it is gone, answers once it is back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import httpx
import pytest

from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.client import EngineClient
from support import scripted_engine
from support.api_client import data_of, error_of
from support.api_service import MODEL, make_service, running
from support.engine_requests import QUICK_RESTARTS
from support.scripted_engine import KILL_ID, RAISE_ID, UNDRAWABLE_ID

PATIENCE_SECONDS = 60.0


@pytest.fixture(name="client")
def client_fixture() -> Iterator[httpx.Client]:
    """A real engine process around a runner without a model."""
    service = make_service(None)

    async def start() -> EngineClient:
        config = ServerConfig(model="scripted")
        return await EngineClient.start(
            config, command=scripted_engine.COMMAND, on_step=service.metrics.observe_step, policy=QUICK_RESTARTS
        )

    with running(service, start) as url, httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as client:
        wait_for(client, 200)
        yield client


def wait_for(client: httpx.Client, status: int) -> None:
    """Until `/ready` says so."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.02)):
        if client.get("/ready").status_code == status:
            return
        pause.wait(0.02)
    pytest.fail(f"/ready never answered {status}")


def complete(client: httpx.Client, prompt: list[int], **fields: object) -> httpx.Response:
    """A completion over ids."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 5, **fields}
    return client.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_the_engine_is_a_500_and_the_engine_comes_back(client: httpx.Client, stream: bool) -> None:
    assert complete(client, [1, 2], stream=stream).status_code == 200
    error = error_of(complete(client, [1, KILL_ID], stream=stream), 500)
    assert error["code"] == "engine_error"
    assert "the engine process died" in error["message"]
    assert client.get("/health").status_code == 200
    wait_for(client, 200)
    assert complete(client, [1, 2], stream=stream).status_code == 200


def test_an_engine_that_dies_under_a_stream_ends_it_with_one_error_event(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 50_000, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_text()
        text = next(pieces)
        killer = threading.Thread(target=complete, args=(client, [3, KILL_ID]))
        killer.start()
        text += "".join(pieces)
        killer.join()
    data = data_of(text)
    assert "error" in json.loads(data[-1])
    assert not any("error" in json.loads(item) for item in data[:-1])
    assert "[DONE]" not in text


@pytest.mark.parametrize("token_id", [RAISE_ID, UNDRAWABLE_ID])
def test_a_step_or_a_draw_that_fails_is_a_500_and_the_engine_goes_on(client: httpx.Client, token_id: int) -> None:
    error = error_of(complete(client, [1, token_id]), 500)
    assert error["code"] == "engine_error"
    assert complete(client, [1, 2]).status_code == 200
