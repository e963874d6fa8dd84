"""A plain HTTP client of the API, and its server-sent events."""

from __future__ import annotations

import json
from typing import Any

import httpx

from support.api_service import MODEL, ScriptedEngine

JsonObject = dict[str, Any]


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
        """The value of one sample of /metrics, written as it is there."""
        return metric_value(self.client.get("/metrics").text, sample)


def metric_value(exposition: str, sample: str) -> float:
    """The value of a sample such as `sapwood_kv_pages{state="free"}`; 0 if it is not there."""
    for line in exposition.splitlines():
        name, _, value = line.rpartition(" ")
        if name == sample:
            return float(value)
    return 0.0


def events_of(response: httpx.Response) -> list[JsonObject]:
    """The chunks of a stream that ended with `[DONE]`."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    data = data_of(response.text)
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def data_of(text: str) -> list[str]:
    """The data of each event, comments left out."""
    events = text.removesuffix("\n\n").split("\n\n")
    return [event.removeprefix("data: ") for event in events if not event.startswith(":")]


def choice_deltas(chunks: list[JsonObject], index: int = 0) -> list[JsonObject]:
    """The chunks' choices with this index, in order."""
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def joined_text(chunks: list[JsonObject], index: int = 0) -> str:
    """The text of one choice, of either route."""
    choices = choice_deltas(chunks, index)
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


def error_of(response: httpx.Response, status: int = 400) -> JsonObject:
    """The error object of a refusal, its shape checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    error: JsonObject = body["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    return error
