"""The order of admission, through the real scheduler. One sequence runs at a time, so order shows in the starts."""

from __future__ import annotations

import pytest

from sapwood_server.engine.admission import MAX_OVERTAKEN, AdmissionQueue
from sapwood_server.engine.sequence import RequestState, SequenceState
from sapwood_server.values.request import Request
from support.digest_kv import ToyTokens
from support.scheduler_world import Story, World, length, make_limits


def _one_at_a_time(num_pages: int = 64) -> World:
    return World(make_limits(num_pages=num_pages, max_num_seqs=1))


def _order(world: World, stories: list[Story]) -> list[int]:
    """Indices of `stories` as they were admitted."""
    world.drain()
    ends = [story.usage.queue_seconds for story in stories]
    return sorted(range(len(stories)), key=ends.__getitem__)


def test_first_come_first_served() -> None:
    world = _one_at_a_time()
    assert _order(world, [world.ask([index, 0, 0]) for index in range(5)]) == [0, 1, 2, 3, 4]


def test_lower_priority_numbers_go_first() -> None:
    world = _one_at_a_time()
    stories = [world.ask([index, 0, 0], priority=priority) for index, priority in enumerate([1, 0, 1, -5])]
    assert _order(world, stories) == [3, 1, 0, 2]


def test_longer_hits_go_first() -> None:
    world = _one_at_a_time()
    world.ask([1] * 12)
    world.drain()
    stories = [world.ask(prompt) for prompt in ([2] * 12, [1] * 5, [3] * 12, [1] * 12)]
    assert _order(world, stories) == [3, 1, 0, 2]


def test_priority_beats_a_hit() -> None:
    world = _one_at_a_time()
    world.ask([1] * 12)
    world.drain()
    stories = [world.ask([1] * 12, priority=1), world.ask([2] * 12)]
    assert _order(world, stories) == [1, 0]


def test_a_request_is_overtaken_so_often_and_then_goes_first() -> None:
    world = _one_at_a_time()
    world.ask([1] * 12, length(1))
    world.drain()
    old = world.ask([2] * 12, length(1))
    overtaken = 0
    while old.final is None:
        world.ask([1] * 12, length(1))
        world.step()
        overtaken += old.final is None
    assert overtaken == MAX_OVERTAKEN
    world.drain()


def test_a_later_arrival_that_fits_does_not_overtake_one_that_does_not() -> None:
    world = World(make_limits(num_pages=8))
    running = world.ask([1] * 12, length(8))
    world.step()
    large = world.ask([2] * 24, length(1))
    small = world.ask([3] * 2, length(1))
    while running.final is None:
        world.step()
        assert not small.events
    world.step()
    assert large.final is not None
    world.drain()


def test_a_queue_takes_out_only_what_waits() -> None:
    queue = AdmissionQueue()
    request = Request(request_id="r", prompt_token_ids=(1,), sampling=length(1))
    state = RequestState(request, 1, ToyTokens(), 0.0)
    sequences = [SequenceState(state, 0, key, b"\0\0\0\1") for key in range(3)]
    for sequence in sequences:
        queue.push_new(sequence)
    queue.remove(sequences[1])
    assert list(queue) == [sequences[0], sequences[2]]
    with pytest.raises(ValueError, match="choice 0 of 'r' does not wait"):
        queue.remove(sequences[1])


@pytest.mark.parametrize(("prompt", "fits"), [(8, True), (9, False)])
def test_an_admission_leaves_a_page_for_the_growth_of_what_runs(prompt: int, fits: bool) -> None:
    world = World(make_limits(num_pages=6))
    world.ask([1] * 8, length(12))
    world.step()
    world.step()  # 9 tokens in 3 pages, 3 are free
    world.ask([2] * prompt, length(1))
    world.step()
    assert (len(world.runner.tables) == 2) == fits
    world.drain()


def test_what_did_not_fit_is_admitted_as_soon_as_it_does() -> None:
    world = World(make_limits(num_pages=10))
    world.ask([1] * 4, length(20))
    short = world.ask([2] * 16, length(3))
    world.step()
    large = world.ask([3] * 20, length(1))
    while short.final is None:
        world.step()
        assert not large.events
    world.step()
    assert large.final is not None
    assert len(world.running()) == 1
    world.drain()
