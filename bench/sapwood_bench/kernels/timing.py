"""How long calls on a device take: contenders in turn, so that a machine that drifts drifts for all of them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sapwood_bench.kernels.errors import MEASURE_ERRORS
from sapwood_bench.kernels.results import Failure

Call = Callable[[], object]

ROUNDS = 5
GRAPH_BELOW_US = 1000.0
"""Shorter calls are replayed from a CUDA graph: a launch from Python takes some ten to a hundred microseconds, and the
device would wait for the next one between two calls."""
_SAMPLE_US = 15_000.0
"""Of one contender in one round; five rounds give its median."""
_MIN_CALLS, _MAX_CALLS = 3, 200
_GRAPH_US = 1500.0
"""Calls in one graph take about so long together, and are at least once round all inputs."""


@dataclass(frozen=True)
class Contender:
    """One way to compute something. Each call has inputs of its own, and they are made in turn, so that none finds in
    the cache what an earlier one left there."""

    name: str
    calls: Sequence[Call]


class Sampler(Protocol):
    """A contender made ready: compiled, warmed up, perhaps captured."""

    def sample(self) -> float:
        """Microseconds of one call, the median of several."""


Prepare = Callable[[Contender], Sampler]


def time_contenders(
    contenders: Sequence[Contender], prepare: Prepare, rounds: int = ROUNDS
) -> dict[str, float | Failure]:
    """Microseconds of a call of each, by name: the median of `rounds` samples taken in turn.

    One of MEASURE_ERRORS while a contender is prepared is its Failure, with the error's first line. All are prepared
    before any is timed.
    """
    results: dict[str, float | Failure] = {}
    samplers: dict[str, Sampler] = {}
    for contender in contenders:
        try:
            samplers[contender.name] = prepare(contender)
        except MEASURE_ERRORS as error:
            results[contender.name] = Failure(first_line(error))
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, sampler in samplers.items():
            samples[name].append(sampler.sample())
    return results | {name: statistics.median(taken) for name, taken in samples.items()}


def first_line(error: BaseException) -> str:
    """An error's type and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def rotations(num_bytes: int, l2_bytes: int, most: int = 12) -> int:
    """How many inputs of so many bytes keep a call from finding its own in a cache of `l2_bytes`: with its next turn,
    more than three times the cache has passed. `most` bounds what small ones take to make."""
    return min(max(-(-3 * l2_bytes // max(num_bytes, 1)) + 1, 2), most)


def cuda_sampler(contender: Contender) -> Sampler:
    """Timed by CUDA events: in a graph if one call takes less than GRAPH_BELOW_US."""
    calls = contender.calls
    for call in calls:
        call()
    torch.cuda.synchronize()
    estimate = _elapsed_us(lambda: [call() for call in calls]) / len(calls)
    if estimate >= GRAPH_BELOW_US:
        return _EventSampler(calls, estimate)
    return _GraphSampler(calls)


class _EventSampler:
    """Events around each call."""

    def __init__(self, calls: Sequence[Call], estimate_us: float) -> None:
        self._calls = itertools.cycle(calls)
        self._count = _count(_SAMPLE_US / estimate_us)

    def sample(self) -> float:
        return statistics.median(_elapsed_us(next(self._calls)) for _ in range(self._count))


class _GraphSampler:
    """Events around replays of many calls at once."""

    def __init__(self, calls: Sequence[Call]) -> None:
        turn_us = _elapsed_us(_capture(calls))  # one turn, replayed: how long calls take without launches
        turns = max(round(_GRAPH_US / max(turn_us, 1.0)), 1)
        self._num_calls = min(turns, 64) * len(calls)
        self._replay = _capture([*calls] * min(turns, 64))
        self._count = _count(_SAMPLE_US / max(_elapsed_us(self._replay), 1.0))

    def sample(self) -> float:
        times = [_elapsed_us(self._replay) for _ in range(self._count)]
        return statistics.median(times) / self._num_calls


def host_sampler(contender: Contender) -> Sampler:
    """One call by the wall clock: in a dry run, whose figures mean nothing."""
    return _HostSampler(contender.calls[0])


class _HostSampler:
    def __init__(self, call: Call) -> None:
        self._call = call
        call()

    def sample(self) -> float:
        started = time.perf_counter()
        self._call()
        return (time.perf_counter() - started) * 1e6


def _count(wanted: float) -> int:
    return int(min(max(wanted, _MIN_CALLS), _MAX_CALLS))


def _capture(calls: Sequence[Call]) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _elapsed_us(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000.0
