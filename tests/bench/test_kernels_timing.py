"""Contenders in turn, medians, and those that can't run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from triton.runtime.errors import OutOfResources, PTXASError

from sapwood_bench.kernels.results import Failure
from sapwood_bench.kernels.timing import Contender, Sampler, first_line, host_sampler, rotations, time_contenders
from sapwood_server.errors import StartupError


class Scripted:
    """A sampler whose samples are known, and which notes when it is asked."""

    def __init__(self, name: str, samples: list[float], asked: list[str]) -> None:
        self._name = name
        self._samples: Iterator[float] = iter(samples)
        self._asked = asked

    def sample(self) -> float:
        self._asked.append(self._name)
        return next(self._samples)


def contender(name: str) -> Contender:
    return Contender(name, [lambda: None])


def test_contenders_are_timed_in_turn_and_the_median_counts() -> None:
    asked: list[str] = []
    samplers = {"a": Scripted("a", [9.0, 1.0, 2.0], asked), "b": Scripted("b", [3.0, 30.0, 4.0], asked)}
    times = time_contenders([contender("a"), contender("b")], lambda each: samplers[each.name], rounds=3)
    assert times == {"a": 2.0, "b": 4.0}
    assert asked == ["a", "b"] * 3


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no kernel\nfor this"),
        NotImplementedError("not this"),
        OutOfResources(300_000, 232_448, "shared memory"),
        PTXASError("ptxas failed"),
        StartupError("no kernel was made for it"),
        subprocess.CalledProcessError(1, "gcc"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_one_that_cannot_run_keeps_nobody_from_running(error: Exception) -> None:
    def prepare(each: Contender) -> Sampler:
        if each.name == "bad":
            raise error
        return Scripted(each.name, [1.0], [])

    times = time_contenders([contender("bad"), contender("good")], prepare, rounds=1)
    assert times == {"good": 1.0, "bad": Failure(first_line(error))}


def test_another_error_is_not_swallowed() -> None:
    def prepare(each: Contender) -> Sampler:
        raise KeyError(each.name)

    with pytest.raises(KeyError):
        time_contenders([contender("bad")], prepare)


def test_an_error_is_quoted_short() -> None:
    assert first_line(RuntimeError("x" * 1000)) == "RuntimeError: " + "x" * 186


@pytest.mark.parametrize(("num_bytes", "count"), [(1, 12), (20, 10), (60, 4), (100, 3), (10**9, 2)])
def test_inputs_pass_through_more_than_three_caches(num_bytes: int, count: int) -> None:
    """But no more than twelve of them, and no fewer than two."""
    assert rotations(num_bytes, l2_bytes=60) == count
    assert count == 12 or (count - 1) * num_bytes >= 180 or count == 2


def test_a_dry_run_calls_and_takes_time() -> None:
    calls: list[int] = []
    sampler = host_sampler(Contender("it", [lambda: calls.append(1)]))
    assert sampler.sample() > 0
    assert len(calls) == 2
