"""The server's metrics, for Prometheus."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sapwood_server.values.events import FinishReason, TokenEvent, Usage
from sapwood_server.values.messages import EngineStats, StepOutput

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_STEP_PARTS = ("schedule", "forward", "sample")
_WELL_ENDED = (FinishReason.STOP, FinishReason.LENGTH)
_PAGE_STATES = ("free", "cached", "active")
_SOURCES = ("computed", "device")


class Metrics:
    """Counters, gauges and histograms in a registry of their own, so that two apps in a process don't share them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._last = EngineStats()
        self._make_gauges()
        self._make_counters()
        self._make_histograms()
        self._http_requests = self._counter("http_requests", "HTTP requests, by route and status.", "path", "status")

    def exposition(self, stats: EngineStats) -> bytes:
        """All metrics in Prometheus' text format; `stats` are the engine's now."""
        self._running.set(stats.requests_running)
        self._waiting.set(stats.requests_waiting)
        for state in _PAGE_STATES:
            self._pages.labels(state).set(getattr(stats, f"pages_{state}"))
        return generate_latest(self.registry)

    def observe_step(self, output: StepOutput) -> None:
        """Take in what the engine says after each step."""
        self._advance(output.stats)
        if output.step_seconds is not None:
            for part in _STEP_PARTS:
                self._step.labels(part).observe(getattr(output.step_seconds, part))

    def count_http(self, path: str, status: int) -> None:
        """An answered HTTP request; `path` is the route's, not the client's."""
        self._http_requests.labels(path, str(status)).inc()

    def count_choices(self, reason: FinishReason, count: int = 1) -> None:
        """So many choices have ended."""
        self._finished.labels(reason.value).inc(count)

    def observe_usage(self, usage: Usage) -> None:
        """The engine's times of a request that has ended."""
        self._queue.observe(usage.queue_seconds)
        self._prefill.observe(usage.prefill_seconds)

    def _advance(self, stats: EngineStats) -> None:
        """Move counters by what the engine's own have grown; they start again at 0 when it is restarted."""
        last = self._last if stats.steps >= self._last.steps else EngineStats()
        self._preemptions.inc(stats.preemptions - last.preemptions)
        self._prompt_tokens.labels("computed").inc(stats.prompt_tokens_computed - last.prompt_tokens_computed)
        self._prompt_tokens.labels("device").inc(stats.prompt_tokens_cached - last.prompt_tokens_cached)
        self._recomputed.inc(stats.recomputed_tokens - last.recomputed_tokens)
        self._generated.inc(stats.generation_tokens - last.generation_tokens)
        self._last = stats

    def _make_gauges(self) -> None:
        self._running = self._gauge("requests_running", "Requests that are being computed.")
        self._waiting = self._gauge("requests_waiting", "Requests in the queue.")
        self._pages = self._gauge("kv_pages", "KV pages: free, cached (reusable, not in use), active.", "state")
        for state in _PAGE_STATES:
            self._pages.labels(state)

    def _make_counters(self) -> None:
        self._finished = self._counter("request_success", "Choices that have ended, by why.", "finish_reason")
        for reason in FinishReason:
            self._finished.labels(reason.value)
        self._preemptions = self._counter("preemptions", "Running requests put back in the queue for want of pages.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, by where their KV came from.", "source")
        for source in _SOURCES:
            self._prompt_tokens.labels(source)
        self._recomputed = self._counter("recomputed_tokens", "Tokens computed again after a preemption.")
        self._generated = self._counter("generation_tokens", "Sampled tokens.")

    def _make_histograms(self) -> None:
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", buckets=_LATENCY_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between the tokens of a choice.", buckets=_TOKEN_BUCKETS
        )
        self._prefill = self._histogram("prefill_seconds", "First admission to first token.", buckets=_LATENCY_BUCKETS)
        self._queue = self._histogram("queue_seconds", "Arrival to first admission.", buckets=_LATENCY_BUCKETS)
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", buckets=_LATENCY_BUCKETS
        )
        self._step = self._histogram("step_seconds", "Parts of one engine step.", "part", buckets=_STEP_BUCKETS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sapwood_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"sapwood_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"sapwood_{name}", text, labels, registry=self.registry, buckets=buckets)

    def time_request(self) -> RequestTimer:
        """A timer that starts now."""
        return RequestTimer(self)


class RequestTimer:
    """Times one HTTP request's tokens as they pass to the client, and counts how its choices end."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._open_choices = 0
        self._last: dict[tuple[str, int], float] = {}

    def expect(self, num_choices: int) -> None:
        """So many choices are about to be generated."""
        self._open_choices = num_choices

    def observe_event(self, event: TokenEvent) -> None:
        """Tokens of a choice. Several at once count as equally spaced since the one before them."""
        now = time.perf_counter()
        if not self._last and event.token_ids:
            self._metrics.first_token.observe(now - self._start)
        key = (event.request_id, event.choice)
        if event.token_ids:
            last = self._last.get(key)
            if last is not None:
                for _ in event.token_ids:
                    self._metrics.inter_token.observe((now - last) / len(event.token_ids))
            self._last[key] = now
        if event.finish_reason in _WELL_ENDED:
            self._open_choices -= 1
            self._metrics.count_choices(event.finish_reason)

    def observe_abort(self, reason: FinishReason) -> None:
        """The choices that have not ended by themselves never will."""
        self._metrics.count_choices(reason, self._open_choices)
        self._open_choices = 0

    def observe_end(self, usage: Usage) -> None:
        """The end of one engine request that ended well."""
        self._metrics.observe_usage(usage)
        self._metrics.latency.observe(time.perf_counter() - self._start)
