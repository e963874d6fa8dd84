"""Health, readiness, version, metrics, unknown routes, request ids, the OpenAPI document."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable

import httpx
import pytest

from sapwood_server.api.metrics import Metrics
from sapwood_server.values.messages import EngineStats, StepOutput, StepSeconds
from support.api_client import Api, error_of, metric_value
from support.api_service import make_service, running, says


def test_a_server_that_loads_is_alive_but_not_ready() -> None:
    with running(make_service(None)) as url, httpx.Client(base_url=url) as client:
        assert client.get("/health").status_code == 200
        assert error_of(client.get("/ready"), 503)["code"] == "loading"
        assert client.get("/version").json()["engine"] is None
        assert client.get("/metrics").status_code == 200
        body = {"model": "scripted", "prompt": "x"}
        assert error_of(client.post("/v1/completions", json=body), 503)["type"] == "service_unavailable"
        assert error_of(client.get("/v1/models"), 503)["code"] == "loading"


def test_a_server_whose_engine_restarts_is_alive_but_not_ready(api: Api) -> None:
    assert api.client.get("/ready").status_code == 200
    api.engine.ready = False
    assert api.client.get("/health").status_code == 200
    assert error_of(api.client.get("/ready"), 503)["code"] == "engine_unavailable"
    api.engine.failure = "it died too often"
    assert "died too often" in error_of(api.client.get("/ready"), 503)["message"]
    api.engine.ready, api.engine.failure = True, None
    assert api.client.get("/ready").status_code == 200


def test_version_shows_what_the_engine_decided(api: Api) -> None:
    body = api.client.get("/version").json()
    assert body["version"]
    assert body["engine"]["page_size"] == 16


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/v1/chat/completions/", "/%00", "/v1/models/"])
def test_an_unknown_route_is_a_404_with_the_error_object(api: Api, path: str) -> None:
    assert error_of(api.client.get(path), 404)["type"] == "invalid_request_error"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_a_wrong_method_is_a_405_that_names_the_right_one(api: Api, method: str) -> None:
    response = api.client.request(method, "/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["Allow"] == "POST"


def test_head_is_get_without_the_body(start: Callable[..., Api]) -> None:
    api = start(keys=("key",))
    for path, status in (("/health", 200), ("/nothing", 404), ("/v1/models", 401), ("/v1/completions", 405)):
        head, get = api.client.head(path), api.client.get(path)
        assert (head.status_code, head.content) == (status, b"")
        assert head.headers["Content-Length"] == get.headers["Content-Length"] != "0"


def test_request_ids_are_echoed_or_made(api: Api) -> None:
    assert api.client.get("/health", headers={"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"
    made = [api.client.get("/nothing").headers["X-Request-Id"] for _ in range(2)]
    assert len(set(made)) == 2
    assert api.chat(stream=True).headers["X-Request-Id"]
    for odd in ("a b", "x" * 129, "\x7f"):
        assert api.client.get("/health", headers={"X-Request-Id": odd}).headers["X-Request-Id"] != odd


def test_http_requests_are_counted_by_route_not_by_what_the_client_wrote(start: Callable[..., Api]) -> None:
    api = start()
    for name in ("scripted", "x", "y"):
        api.client.get(f"/v1/models/{name}")
    for path in ("/a", "/b"):
        api.client.get(path)
    assert api.metric('sapwood_http_requests_total{path="/v1/models/{model:path}",status="404"}') == 2
    assert api.metric('sapwood_http_requests_total{path="unmatched",status="404"}') == 2


def test_answers_are_counted_and_timed(start: Callable[..., Api]) -> None:
    api = start(says("hello", per_event=2))
    api.chat(n=2)
    api.chat(stream=True)
    assert api.metric('sapwood_request_success_total{finish_reason="stop"}') == 3
    assert api.metric('sapwood_request_success_total{finish_reason="cancelled"}') == 0
    for name, count in (
        ("time_to_first_token", 2),
        ("e2e_request_latency", 2),
        ("queue", 2),
        ("prefill", 2),
        ("inter_token_latency", 3 * 4),
    ):
        assert api.metric(f"sapwood_{name}_seconds_count") == count, name


def test_two_apps_share_no_metrics(start: Callable[..., Api]) -> None:
    first, second = start(), start()
    first.chat()
    assert second.metric('sapwood_request_success_total{finish_reason="stop"}') == 0


def test_steps_move_the_engines_metrics_also_over_a_restart() -> None:
    metrics = Metrics()
    counters = itertools.accumulate([1, 1])
    for count in counters:
        stats = EngineStats(
            steps=count,
            preemptions=count,
            prompt_tokens_computed=100 * count,
            prompt_tokens_cached=10 * count,
            recomputed_tokens=count,
            generation_tokens=5 * count,
        )
        seconds = StepSeconds(schedule=0.001, forward=0.1, sample=0.01)
        metrics.observe_step(StepOutput(events=(), stats=stats, step_seconds=seconds))
    metrics.observe_step(StepOutput(events=(), stats=EngineStats(steps=1, generation_tokens=7)))
    text = metrics.exposition(EngineStats()).decode()
    expected = {
        "preemptions_total": 2,
        'prompt_tokens_total{source="computed"}': 200,
        'prompt_tokens_total{source="device"}': 20,
        "recomputed_tokens_total": 2,
        "generation_tokens_total": 17,
        'step_seconds_count{part="schedule"}': 2,
        'step_seconds_sum{part="schedule"}': 0.002,
        'step_seconds_sum{part="forward"}': 0.2,
        'step_seconds_sum{part="sample"}': 0.02,
    }
    assert {name: metric_value(text, f"sapwood_{name}") for name in expected} == expected


def gauges(api: Api) -> list[float]:
    """Requests running and waiting, pages free, cached and active."""
    states = [f'kv_pages{{state="{state}"}}' for state in ("free", "cached", "active")]
    return [api.metric(f"sapwood_{name}") for name in ("requests_running", "requests_waiting", *states)]


def test_gauges_show_the_engine_as_it_is_also_when_it_is_gone(start: Callable[..., Api]) -> None:
    api = start()
    api.engine.stats = EngineStats(
        requests_running=3, requests_waiting=2, pages_free=10, pages_cached=20, pages_active=30
    )
    assert gauges(api) == [3, 2, 10, 20, 30]
    api.engine.ready, api.engine.stats = False, EngineStats()  # as EngineClient's, when the process has died
    assert gauges(api) == [0, 0, 0, 0, 0]


def test_the_openapi_document_describes_the_bodies(api: Api) -> None:
    document = api.client.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    properties = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "forced_tokens"} <= properties.keys()
    assert document["components"]["schemas"]["ChatBody"]["additionalProperties"] is False
    assert not re.search(r'"422"|sapwood_server', json.dumps(document)), "no answer of FastAPI's own, no module's name"


def test_the_openapi_document_describes_answers_errors_and_keys(api: Api) -> None:
    document = api.client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    chat = document["paths"]["/v1/chat/completions"]["post"]
    answer, error = chat["responses"]["200"]["content"], chat["responses"]["default"]["content"]
    assert answer["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatCompletion"}
    assert answer["text/event-stream"]["schema"] == {"$ref": "#/components/schemas/Chunk"}
    assert schemas["ChatCompletion"]["required"] == ["id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert error["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
    assert schemas["ErrorObject"]["required"] == ["message", "type", "param", "code"]
    (scheme,) = document["components"]["securitySchemes"].values()
    assert scheme["scheme"] == "bearer"
    assert chat["security"]
    assert "security" not in document["paths"]["/health"]["get"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= schemas.keys()
    assert api.client.get("/docs").status_code == 200
