"""The timing clients, against a real HTTP server with scripted answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sapwood_bench import llama_cpp
from sapwood_bench.client import RequestFailed, Timed, complete, post, stream_events, timed

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
STREAMS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"choices": [{"text": "", "token_ids": []}]},
        {"choices": [{"text": "", "token_ids": [7]}]},
        {"choices": [{"text": "ab", "token_ids": [8]}]},
        {"choices": [{"text": "", "token_ids": [], "finish_reason": "length"}]},
        {"choices": [], "usage": USAGE},
    ],
    "/completion": [
        {"content": "", "stop": False},
        {"content": "ab", "stop": False},
        {"content": "", "stop": True, "tokens_evaluated": 3, "tokens_predicted": 2},
    ],
}


class Scripted(BaseHTTPRequestHandler):
    """Answers `/v1/models`, the two streams, and 400 to everything else, with the body it was sent."""

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path not in STREAMS:
            self._answer(400, body)
            return
        events = [b": a comment\n\n", *(b"data: %s\n\n" % json.dumps(e).encode() for e in STREAMS[self.path])]
        self._answer(200, b"".join([*events, b"data: [DONE]\n\n"]))

    def log_message(self, *_args: object) -> None:
        """Quiet."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(name="base_url", scope="module")
def scripted_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def check(answer: Timed, cached: int) -> None:
    assert answer.text == "ab"
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (3, cached, 2)
    assert answer.ttft_seconds > 0
    assert answer.decode_seconds > 0


def test_our_stream(base_url: str) -> None:
    check(complete(base_url, (1, 2, 3), 2), cached=1)


def test_llama_cpps_stream_is_read_the_same_way(base_url: str) -> None:
    check(llama_cpp.complete(base_url, (1, 2, 3), 2), cached=0)


@pytest.mark.parametrize(
    ("path", "read", "first", "last"),
    [("/v1/completions", timed, 2.0, 3.0), ("/completion", llama_cpp.timed, 1.0, 2.0)],
)
def test_times_are_those_of_tokens_not_of_text(
    path: str, read: Callable[[list[tuple[float, dict[str, Any]]]], Timed], first: float, last: float
) -> None:
    """The first of the two tokens ends inside a character. The n-th event comes after n seconds."""
    times = read([(float(number), event) for number, event in enumerate(STREAMS[path], start=1)])
    assert (times.ttft_seconds, times.decode_seconds) == (first, last - first)


def test_comments_and_done_are_no_events(base_url: str) -> None:
    events = [event for _, event in stream_events(base_url, "/completion", {})]
    assert events == STREAMS["/completion"]


def test_a_refusal_carries_the_servers_words(base_url: str) -> None:
    with pytest.raises(RequestFailed, match=r'POST /wrong: 400 \{"key": 1\}'):
        post(base_url, "/wrong", {"key": 1})


def test_rates_count_what_was_computed() -> None:
    timed = Timed(
        text="", ttft_seconds=2.0, decode_seconds=4.0, prompt_tokens=110, cached_tokens=10, completion_tokens=9
    )
    assert timed.prefill_tokens_per_second == 50.0
    assert timed.decode_tokens_per_second == 2.0
