"""Prefixes shared by requests in flight, and by the choices of one request."""

from __future__ import annotations

import pytest

from sapwood_server.values.plan import PageCopy, Phase
from support.scheduler_world import World, length, make_limits


def test_a_prefix_that_arrives_sixteen_times_at_once_is_computed_once() -> None:
    world = World(make_limits(num_pages=400, page_size=16, max_num_seqs=16, max_batched_tokens=256, max_model_len=2000))
    prefix = [index % 5 for index in range(1000)]
    stories = [world.ask([*prefix, 6, index % 6, index // 6, *[index % 3] * 17]) for index in range(16)]
    world.drain()
    first, *others = (story.usage for story in stories)
    assert first.computed_tokens == 1020
    assert all(usage.cached_tokens >= 1001 for usage in others)
    assert world.runner.computed == sum(s.usage.computed_tokens for s in stories) + 16
    assert sum(s.usage.computed_tokens for s in stories) <= 1000 + 16 * 20


def test_the_waiting_hold_nothing_and_wait_no_longer_than_for_what_they_share() -> None:
    world = World(make_limits(max_batched_tokens=8))
    leader = world.ask([1] * 10 + [2] * 9)
    follower = world.ask([1] * 10 + [3] * 4)
    first = world.step()
    assert first is not None
    assert [s.owner.request for s in world.running()] == [leader.request]
    assert world.scheduler.stats().pages_active == 2
    second = world.step()
    assert second is not None
    assert len(second.rows) == 1, "10 shared tokens, of which 8 were computed before this step"
    third = world.step()
    assert third is not None
    assert [(row.start, len(row.token_ids)) for row in third.rows] == [(16, 3), (10, 4)]
    world.drain()
    assert follower.usage.cached_tokens == 10
    assert leader.usage.cached_tokens == 0


def test_when_the_leader_is_cancelled_a_follower_leads() -> None:
    world = World(make_limits(max_batched_tokens=8))
    leader = world.ask([1] * 40)
    followers = [world.ask([1] * 40 + [2]), world.ask([1] * 40 + [3])]
    world.step()
    world.step()
    world.cancel(leader.request.request_id)
    world.drain()
    assert followers[0].usage.cached_tokens == 16, "what the leader had computed"
    assert followers[1].usage.cached_tokens == 40
    assert world.runner.computed == 16 + 25 + 1 + 2


def test_other_salts_neither_wait_nor_share() -> None:
    world = World(make_limits(max_batched_tokens=8))
    stories = [world.ask([1] * 40, salt=salt) for salt in ("a", "b")]
    world.step()
    world.step()
    world.drain()
    assert [story.usage.cached_tokens for story in stories] == [0, 0]
    again = world.ask([1] * 40, salt="b")
    world.drain()
    assert again.usage.cached_tokens == 39


def test_without_prefix_cache_nobody_waits() -> None:
    world = World(make_limits(max_batched_tokens=100, prefix_cache=False))
    stories = [world.ask([1] * 40), world.ask([1] * 40)]
    world.step()
    assert len(world.running()) == 2
    world.drain()
    assert [story.usage.cached_tokens for story in stories] == [0, 0]


def test_a_conversation_reuses_all_but_the_last_sampled_token() -> None:
    world = World(make_limits(num_pages=200))
    prompt: list[int] = [1, 2, 3]
    resident = 0
    for turn in range(20):
        story = world.ask(prompt, length(5), forced=[[turn % 6, 1, 2, 3, turn // 6]])
        world.drain()
        assert story.usage.cached_tokens == resident
        resident = len(prompt) + 5 - 1
        prompt = [*prompt, *story.ids(0), 4, turn % 5]


def test_decoding_requests_share_the_tokens_they_have_written_so_far() -> None:
    world = World(make_limits())
    first = world.ask([1, 2, 3, 4, 5], length(20))
    for _ in range(4):
        world.step()
    second = world.ask([1, 2, 3, 4, 5, *first.ids(0), 0])
    world.drain()
    assert second.usage.cached_tokens == 5 + 3, "the fourth sampled token has no KV yet"


@pytest.mark.parametrize("n", [2, 3, 7])
def test_choices_are_prefilled_once_and_fork_with_a_copy(n: int) -> None:
    world = World(make_limits())
    forced = [[choice % 6, 0, choice // 6] for choice in range(n)]
    story = world.ask([1, 2, 3, 4, 5], length(3, n=n), forced=forced)
    prefill = world.step()
    assert prefill is not None
    (row,) = prefill.rows
    assert [spec.choice for spec in row.samples] == list(range(n))
    assert [spec.forced for spec in row.samples] == [choice % 6 for choice in range(n)]
    fork = world.step()
    assert fork is not None
    assert [list(row.new_pages) for row in fork.rows] == [[], *[[1, 3 + index] for index in range(n - 1)]]
    assert fork.copies == tuple(PageCopy(2, 3 + index, 1) for index in range(n - 1))
    assert {row.phase for row in fork.rows} == {Phase.DECODE}
    world.drain()
    usage = story.usage
    assert (usage.prompt_tokens, usage.computed_tokens, usage.completion_tokens) == (5, 5, 3 * n)
    assert (usage.recomputed_tokens, usage.preemptions) == (0, 0)
    assert [story.ids(choice) for choice in range(n)] == [tuple(ids) for ids in forced]
    assert world.runner.computed == 5 + 2 * n


def test_choices_take_turns_where_there_is_room_for_one() -> None:
    world = World(make_limits(max_num_seqs=1))
    story = world.ask([1, 2, 3, 4, 5], length(4, n=3))
    world.drain()
    assert story.usage.completion_tokens == 12
    assert story.usage.recomputed_tokens == 0


def test_a_choice_that_ends_at_its_first_token_does_not_fork() -> None:
    world = World(make_limits())
    story = world.ask([1, 2, 3], length(1, n=3))
    plan = world.step()
    assert plan is not None
    assert story.final is not None
    assert world.step() is None
    world.drain()


def test_two_requests_that_generate_the_same_keep_one_copy() -> None:
    world = World(make_limits())
    stories = [world.ask([1, 2, 3, 4, 5], length(12), salt="") for _ in range(2)]
    world.drain()
    assert stories[0].ids(0) == stories[1].ids(0)
    assert world.cache.num_cached == 4, "16 tokens with KV"
