"""Streamed requests with a clock on the client's side: what a person in front of the server would measure."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sapwood_server.errors import SapwoodError

REQUEST_SECONDS = 600.0

_DATA = b"data: "
_DONE = b"[DONE]"


class RequestFailed(SapwoodError):
    """A server answered with something other than 200. The message has its answer."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One finished request. Seconds count from just before the request was sent."""

    text: str
    ttft_seconds: float
    """Until the first token's event, which may have no text: a token can end inside a character."""
    decode_seconds: float
    """From that event to the last token's."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first, over the time they took."""
        return (self.completion_tokens - 1) / self.decode_seconds

    @property
    def prefill_tokens_per_second(self) -> float:
        """Uncached prompt tokens over the time to the first token."""
        return (self.prompt_tokens - self.cached_tokens) / self.ttft_seconds


def complete(base_url: str, prompt: Sequence[int], max_tokens: int) -> Timed:
    """A greedy completion of exactly `max_tokens` tokens streamed over `/v1/completions`."""
    body = {
        "model": served_model(base_url),
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return timed(stream_events(base_url, "/v1/completions", body))


def timed(events: Iterable[tuple[float, dict[str, Any]]]) -> Timed:
    """The times of a stream of one choice that carries its token ids and ends with its usage."""
    arrivals: list[tuple[float, str]] = []
    usage: dict[str, Any] = {}
    for seconds, event in events:
        arrivals += [(seconds, choice["text"]) for choice in event["choices"] if choice.get("token_ids")]
        usage = event.get("usage") or usage
    return Timed(
        text="".join(text for _, text in arrivals),
        ttft_seconds=arrivals[0][0],
        decode_seconds=arrivals[-1][0] - arrivals[0][0],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
    )


def chat(base_url: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> tuple[str, dict[str, Any]]:
    """A greedy chat reply, not streamed, and its usage."""
    body = {"model": served_model(base_url), "messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
    answer = post(base_url, "/v1/chat/completions", body)
    return answer["choices"][0]["message"]["content"], answer["usage"]


def served_model(base_url: str) -> str:
    """The first model that the server lists."""
    return str(json.loads(get(base_url, "/v1/models"))["data"][0]["id"])


def get(base_url: str, path: str) -> bytes:
    """The body of an answer. Raises RequestFailed unless the status is 200."""
    return _call(base_url, "GET", path, None)


def post(base_url: str, path: str, body: Mapping[str, object]) -> dict[str, Any]:
    """Sends a JSON body, returns the JSON answer. Raises RequestFailed unless the status is 200."""
    answer: dict[str, Any] = json.loads(_call(base_url, "POST", path, body))
    return answer


def stream_events(base_url: str, path: str, body: Mapping[str, object]) -> Iterator[tuple[float, dict[str, Any]]]:
    """`(seconds since sending, event)` for each server-sent event. Raises RequestFailed unless the status is 200."""
    connection = _connect(base_url)
    try:
        started = time.perf_counter()
        response = _send(connection, "POST", path, body)
        for line in response:
            if line.startswith(_DATA) and not line.startswith(_DATA + _DONE):
                yield time.perf_counter() - started, json.loads(line[len(_DATA) :])
    finally:
        connection.close()


def _call(base_url: str, method: str, path: str, body: Mapping[str, object] | None) -> bytes:
    connection = _connect(base_url)
    try:
        return _send(connection, method, path, body).read()
    finally:
        connection.close()


def _connect(base_url: str) -> http.client.HTTPConnection:
    address = urlsplit(base_url)
    return http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=REQUEST_SECONDS)


def _send(
    connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, object] | None
) -> http.client.HTTPResponse:
    payload = None if body is None else json.dumps(body)
    connection.request(method, path, payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RequestFailed(f"{method} {path}: {response.status} {response.read().decode(errors='replace')[:500]}")
    return response
