"""Too little room: preemption, eviction, refusal. Nothing is lost, nothing is counted twice, nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from sapwood_server.values.events import FinishReason
from sapwood_server.values.plan import Phase, RowPlan
from support.scale import scaled
from support.scheduler_world import World, length, make_limits


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Field case pc-05: the stream continues at the next token, and each token counts once. (That the output is the
    uninterrupted one is checked for every request of every world.)"""
    world = World(make_limits(num_pages=7))
    old = world.ask([1] * 6, length(14))
    young = world.ask([2] * 6, length(14))
    while not young.events:
        world.step()
    streamed = len(young.ids(0))
    while not world.scheduler.stats().preemptions:
        streamed = len(young.ids(0))
        world.step()
    assert streamed > 0
    assert old.final is None
    world.drain()
    assert (old.usage.preemptions, young.usage.preemptions) == (0, 1)
    assert len(young.ids(0)) == young.usage.completion_tokens == 14
    assert young.usage.cached_tokens == 0
    assert young.usage.computed_tokens == 6


def test_of_a_preempted_request_only_the_page_that_was_needed_is_computed_again() -> None:
    world = World(make_limits(num_pages=7))
    old = world.ask([1] * 6, length(14))
    young = world.ask([2] * 6, length(14))
    while not world.scheduler.stats().preemptions:
        world.step()
    assert world.cache.num_cached == 2, "the young one's three pages but one"
    world.cancel(old.request.request_id)
    world.drain()
    assert 0 < young.usage.recomputed_tokens <= 4


def test_the_last_admitted_goes_first_and_comes_back_first() -> None:
    world = World(make_limits(num_pages=12))
    stories = [world.ask([index] * 8, length(16)) for index in range(3)]
    preempted: list[int] = []
    while world.scheduler.has_unfinished:
        world.step()
        preempted.append(world.scheduler.stats().preemptions)
        assert stories[0].final is not None or len(world.running()) > 0
    world.drain()
    assert preempted[-1] > 0
    assert stories[0].usage.preemptions == 0
    assert stories[1].usage.preemptions <= stories[2].usage.preemptions


def test_a_lower_priority_goes_before_a_later_admission() -> None:
    world = World(make_limits(num_pages=7))
    background = world.ask([1] * 6, length(14), priority=5)
    world.step()
    urgent = world.ask([2] * 6, length(14))
    world.drain()
    assert (background.usage.preemptions > 0, urgent.usage.preemptions) == (True, 0)


def test_recompute_is_prefill() -> None:
    world = World(make_limits(num_pages=6))
    world.ask([1] * 6, length(14))
    world.ask([2] * 6, length(14))
    rows: list[RowPlan] = []
    while (plan := world.step()) is not None:
        rows += plan.rows
    returned = [row for row in rows if row.sequence_id > 2]
    assert returned[0].start + len(returned[0].token_ids) > 7
    assert returned[0].phase is Phase.PREFILL
    assert world.scheduler.stats().recomputed_tokens > 0
    world.drain()


def test_unrelated_prompts_hit_nothing_however_often_they_are_preempted() -> None:
    """Field case pc-06: reading its own tokens again is recompute or reuse, never a hit."""
    rng = random.Random(3)
    world = World(make_limits(num_pages=40, page_size=16, max_batched_tokens=128))
    for index in range(scaled(1000, 40)):
        digits = [index // 1000, index // 100 % 10, index // 10 % 10, index % 10]
        world.ask([*digits, *rng.choices(range(1000), k=100)], length(100))
        while world.scheduler.stats().requests_waiting > 4:
            world.step()
    world.drain()
    stats = world.scheduler.stats()
    assert stats.preemptions > 10
    assert stats.recomputed_tokens > 0
    prompts = sum(len(story.request.prompt_token_ids) for story in world.stories.values())
    assert stats.prompt_tokens_cached + stats.prompt_tokens_computed == prompts
    # Two unrelated prompts may begin with the same few ids.
    assert stats.prompt_tokens_cached < 0.04 * prompts
    assert all(story.usage.cached_tokens <= 4 for story in world.stories.values())


def test_a_request_larger_than_the_pool_is_refused_at_once_and_the_next_is_served() -> None:
    """Field case lm-03."""
    world = World(make_limits(num_pages=10, page_size=4, max_model_len=10_000))
    too_large = world.ask([1] * 40, length(1))
    assert too_large.final is not None
    assert too_large.final.error == "the request needs room for 41 tokens, the KV pool holds 40"
    assert not world.scheduler.has_unfinished
    fits = world.ask([1] * 39, length(1))
    small = world.ask([2] * 3)
    world.drain()
    assert (fits.usage.completion_tokens, small.usage.completion_tokens) == (1, 2)


@pytest.mark.parametrize("max_batched_tokens", [1, 3, 64])
def test_requests_as_large_as_the_pool_all_end(max_batched_tokens: int) -> None:
    world = World(make_limits(num_pages=6, max_batched_tokens=max_batched_tokens))
    stories = [world.ask([1] * 10 + [index], length(13)) for index in range(4)]
    stories += [world.ask([1] * 10, length(None, n=3)), world.ask([1, 1], length(22))]
    world.drain()
    assert all(reason is FinishReason.LENGTH for story in stories for reason in story.finish_reasons(0))


def test_the_only_request_left_gives_up_its_duplicates_to_go_on() -> None:
    """Two that generate the same: the second holds its own pages and those of the first, which it goes on below."""
    world = World(make_limits(num_pages=8))
    first = world.ask([1] * 4, length(12))
    second = world.ask([1] * 4, length(28))
    while first.final is None:
        world.step()
    assert len(second.ids(0)) > 5
    world.drain()
    assert second.usage.completion_tokens == 28
    assert second.usage.preemptions > 0


def test_a_source_is_taken_over_where_the_pool_has_no_other_page() -> None:
    world = World(make_limits(num_pages=3))
    world.ask([1, 2, 3, 1, 2, 3, 1, 2, 3, 1], length(1))  # leaves three pages, the last one partial
    world.drain()
    story = world.ask([1, 2, 3, 1, 2, 3, 1, 2, 3, 0], length(2))
    world.drain()
    assert story.usage.cached_tokens == 9
    assert world.cache.num_takeovers == 1


def test_the_tokens_of_a_preempted_row_go_to_the_one_that_needed_its_pages() -> None:
    world = World(make_limits(num_pages=8, max_batched_tokens=2))
    world.ask([1] * 4, length(28), priority=1)
    for _ in range(3):
        world.step()
    urgent = world.ask([2] * 16, length(1))
    plan = world.step()
    while plan is not None and not world.scheduler.stats().preemptions:
        assert [len(row.token_ids) for row in plan.rows] == [1, 1]
        plan = world.step()
    assert plan is not None
    assert [len(row.token_ids) for row in plan.rows] == [2]
    assert [s.owner.request for s in world.running()] == [urgent.request]
    world.drain()


def test_the_last_in_order_stands_aside_before_it_loses_its_pages() -> None:
    world = World(make_limits(num_pages=5))
    first = world.ask([1] * 8, length(5))
    second = world.ask([2] * 7, length(6))
    widths = []
    while (plan := world.step()) is not None:
        widths.append(len(plan.rows))
    assert widths == [2, 2, 1, 1, 1, 1, 1, 1, 1]
    assert (first.usage.preemptions, second.usage.preemptions) == (0, 0)
    world.drain()
