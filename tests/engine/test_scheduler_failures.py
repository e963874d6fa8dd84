"""What a failed step and a failed draw end, and what they leave in the cache."""

from __future__ import annotations

import pytest

from sapwood_server.values.events import FinishReason
from sapwood_server.values.plan import DrawFailure
from sapwood_server.values.sampling import SamplingParams
from support.digest_kv import END_ID
from support.scheduler_world import World, length, make_limits


def test_a_failed_step_ends_every_request_and_empties_the_cache() -> None:
    world = World(make_limits(max_num_seqs=1))
    world.ask([1] * 8, length(1))
    world.drain()
    running = world.ask([1] * 8, length(5))
    queued = world.ask([2] * 8)
    world.step()
    world.fail_step()
    for story in (running, queued):
        assert story.final is not None
        assert story.final.error == "the device is gone"
    assert running.finish_reasons(0) == [FinishReason.ERROR]
    later = world.ask([1] * 8, length(1))
    plan = world.step()
    assert plan is not None
    assert plan.released == (1, 2) or plan.released == (2,)
    assert later.usage.cached_tokens == 0


NOT_FINITE = "the engine failed while it ran this request: the model gave logits that are not finite"


@pytest.mark.parametrize("failure", DrawFailure)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_draw_that_fails_ends_its_request_alone(failure: DrawFailure, steps: int) -> None:
    """At the first token or later; the others' tokens are those foretold for each of them alone (see `World`)."""
    world = World(make_limits())
    others = [world.ask([index, 1, 2], length(9)) for index in range(3)]
    story = world.ask([5, 1, 2], length(9))
    for _ in range(steps):
        world.step()
    world.break_draws(story, failure)
    plan = world.step()
    assert plan is not None
    assert len(plan.rows) == 4
    assert story.final is not None
    assert story.final.error == f"the engine failed while it ran this request: {failure.value}"
    assert (story.final.cancelled, story.finish_reasons(0)) == (False, [FinishReason.ERROR])
    assert (len(story.ids(0)), story.usage.completion_tokens) == (steps, steps)
    world.drain()
    assert [len(other.ids(0)) for other in others] == [9, 9, 9]


@pytest.mark.parametrize("steps", range(5))
def test_a_draw_that_fails_ends_all_choices_of_its_request(steps: int) -> None:
    """In the prefill that they share, while some wait to fork off it, and later; those that have ended stay ended."""
    world = World(make_limits(max_num_seqs=2))
    sampling = SamplingParams(n=4, max_tokens=9)
    story = world.ask([1, 2, 3], sampling, forced=[[0, END_ID], *[[1] * 9] * 3])
    for _ in range(steps):
        world.step()
    world.break_draws(story, DrawFailure.NOTHING_LEFT, choice=1)
    while story.final is None:
        world.step()
    ended_itself = steps > 0  # in the second step at the latest, whose first row is its
    assert [story.finish_reasons(choice) for choice in range(4)] == [
        [FinishReason.STOP if ended_itself else FinishReason.ERROR],
        *[[FinishReason.ERROR]] * 3,
    ]
    assert world.step() is None
    assert world.scheduler.stats().pages_active == 0


def test_a_request_that_is_cancelled_while_its_draw_fails_is_cancelled() -> None:
    world = World(make_limits())
    story = world.ask([1, 2, 3], length(9))
    world.break_draws(story, DrawFailure.NOT_FINITE)
    world.step(lambda: world.cancel(story.request.request_id))
    assert story.final is not None
    assert (story.final.cancelled, story.final.error) == (True, None)
    assert world.cache.num_free == world.cache.num_pages, "its pages are as doubtful as without the cancel"


def test_a_draw_that_its_settings_made_fail_leaves_its_pages_in_the_cache() -> None:
    world = World(make_limits())
    story = world.ask([1] * 8, length(9))
    world.break_draws(story, DrawFailure.NOTHING_LEFT)
    world.step()
    again = world.ask([1] * 9)
    world.drain()
    assert again.usage.cached_tokens == 8


def test_pages_behind_logits_that_are_not_finite_are_not_used_again() -> None:
    """Neither those of the step that showed it, nor those of earlier ones, nor those that an earlier request had left:
    any of them may be the damaged one. What another request is using stays for it, until it fails too."""
    world = World(make_limits(max_batched_tokens=8))
    world.ask([1] * 10 + [2], length(1))  # leaves three pages
    world.drain()
    user = world.ask([1] * 4 + [3], length(50))
    world.step()
    story = world.ask([1] * 30, length(9))
    world.break_draws(story, DrawFailure.NOT_FINITE)
    while story.final is None:
        world.step()
    assert (story.final.error, story.usage.cached_tokens) == (NOT_FINITE, 10)
    assert world.cache.num_cached == 0
    again = world.ask([1] * 30, length(1))
    while again.final is None:
        world.step()
    assert again.usage.cached_tokens == 4
    world.break_draws(user, DrawFailure.NOT_FINITE)
    world.step()
    assert world.cache.num_free == world.cache.num_pages
    world.drain()


def test_what_others_computed_in_the_same_step_does_not_give_way_to_damaged_pages() -> None:
    """Two requests fill equal pages in one step; the first one's are damaged, so the second one's are to be found."""
    world = World(make_limits())
    first = world.ask([1] * 6, length(20), forced=[[0] * 20])
    second = world.ask([1] * 6 + [0], length(20), forced=[[0] * 20])
    world.step()
    world.step()
    assert (first.ids(0), second.ids(0)) == ((0, 0), (0,))
    world.break_draws(first, DrawFailure.NOT_FINITE)
    world.step()
    assert first.final is not None
    again = world.ask([1] * 6 + [0] * 4, length(2))
    world.drain()
    assert again.usage.cached_tokens == 8


def test_the_source_of_a_copy_behind_logits_that_are_not_finite_is_not_used_again() -> None:
    """A prompt shorter than a page: what it read hangs below the root, and not in its own chain."""
    world = World(make_limits())
    world.ask([1, 2, 3], length(1))
    world.drain()
    story = world.ask([1, 2, 3], length(9))
    world.break_draws(story, DrawFailure.NOT_FINITE)
    world.step()
    assert story.usage.cached_tokens == 2
    assert world.cache.num_free == world.cache.num_pages


def test_who_waits_for_the_tokens_of_a_request_that_fails_computes_them() -> None:
    world = World(make_limits(max_batched_tokens=8))
    leader = world.ask([1] * 20)
    waiting = world.ask([1] * 20, length(3))
    world.step()
    world.break_draws(leader, DrawFailure.NOT_FINITE)
    world.drain()
    assert leader.usage.completion_tokens == 0
    assert (waiting.usage.cached_tokens, waiting.usage.completion_tokens) == (0, 3)
