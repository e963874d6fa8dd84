"""One request's life through the real scheduler: plans, events, ends."""

from __future__ import annotations

import pytest

from sapwood_server.cache.integrity import IntegrityError
from sapwood_server.values.events import FinishReason
from sapwood_server.values.plan import Phase, Sampled, StepResult, TokenLogprob
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams
from support.digest_kv import END_ID, OTHER_END_ID
from support.scheduler_world import Story, World, length, make_limits


def _forced(world: World, ids: list[int], sampling: SamplingParams) -> Story:
    story = world.ask([1, 2, 3], sampling, forced=[ids])
    world.drain()
    return story


def test_prefill_in_chunks_then_decode() -> None:
    world = World(make_limits(max_batched_tokens=6))
    story = world.ask([1, 2, 3, 4, 5, 0, 1, 2, 3], length(3), forced=[[5, 5, 5]])
    plans = [world.step() for _ in range(4)]
    rows = [plan.rows[0] for plan in plans if plan is not None]
    assert [(row.start, tuple(row.token_ids), list(row.new_pages)) for row in rows] == [
        (0, (1, 2, 3, 4, 5, 0), [1, 2]),
        (6, (1, 2, 3), [3]),
        (9, (5,), []),
        (10, (5,), []),
    ]
    assert [row.phase for row in rows] == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    assert [len(row.samples) for row in rows] == [0, 1, 1, 1]
    assert story.ids(0) == (5, 5, 5)
    assert world.step() is None


def test_a_last_chunk_of_one_token_is_prefill() -> None:
    world = World(make_limits(max_batched_tokens=2))
    world.ask([1, 2, 3], length(1))
    plans = [world.step(), world.step()]
    assert [plan.rows[0].phase for plan in plans if plan is not None] == [Phase.PREFILL, Phase.PREFILL]


def test_decodes_go_first_and_prefills_take_the_rest_of_the_step() -> None:
    world = World(make_limits(max_batched_tokens=10))
    world.ask([1] * 3, length(20))
    world.ask([2] * 3, length(20))
    world.step()
    world.ask([3] * 30)
    plan = world.step()
    assert plan is not None
    assert [len(row.token_ids) for row in plan.rows] == [1, 1, 8]


def test_several_requests_are_admitted_in_one_step() -> None:
    world = World(make_limits(max_batched_tokens=64, max_num_seqs=3))
    for index in range(5):
        world.ask([index, 1, 1])
    plan = world.step()
    assert plan is not None
    assert [row.sequence_id for row in plan.rows] == [1, 2, 3]
    assert world.scheduler.stats().requests_running == 3
    assert world.scheduler.stats().requests_waiting == 2


@pytest.mark.parametrize("max_batched_tokens", [1, 4, 7])
def test_every_stream_gets_a_token_in_each_step_though_more_might_run_than_a_step_has_tokens(
    max_batched_tokens: int,
) -> None:
    world = World(make_limits(max_num_seqs=64, max_batched_tokens=max_batched_tokens))
    for index in range(3 * max_batched_tokens):
        world.ask([index % 5, index, 1], length(6), priority=-index)
    most = 0
    while world.step() is not None:  # each step checks that nobody was left out
        most = max(most, len(world.running()))
    assert most == max_batched_tokens
    world.drain()


def test_what_ended_is_released_in_the_next_plan() -> None:
    world = World(make_limits())
    world.ask([1, 2, 3], length(1))
    world.ask([2, 2, 3], length(3))
    first = world.step()
    second = world.step()
    assert first is not None
    assert second is not None
    assert (first.released, second.released) == ((), (1,))
    assert second.ended_choices == (first.rows[0].samples[0].choice_key,)


@pytest.mark.parametrize("end_id", [END_ID, OTHER_END_ID])
def test_an_end_token_ends_without_text(end_id: int) -> None:
    story = _forced(World(make_limits()), [0, 1, end_id], SamplingParams())
    assert story.ids(0) == (0, 1, end_id)
    assert story.text(0) == b"ab"
    assert story.finish_reasons(0) == [FinishReason.STOP]


def test_ignore_eos_goes_on() -> None:
    story = _forced(World(make_limits()), [0, END_ID, 1], length(3))
    assert story.ids(0) == (0, END_ID, 1)
    assert story.finish_reasons(0) == [FinishReason.LENGTH]


def test_a_stop_token_is_no_part_of_the_text() -> None:
    story = _forced(World(make_limits()), [0, 1, 5], SamplingParams(stop_token_ids=(5,), ignore_eos=True))
    assert (story.ids(0), story.text(0)) == ((0, 1, 5), b"ab")
    assert story.finish_reasons(0) == [FinishReason.STOP]


def test_a_stop_string_across_tokens_is_held_back_and_cut() -> None:
    world = World(make_limits())
    story = world.ask([1, 2, 3], SamplingParams(stop=(b"baab",), ignore_eos=True), forced=[[0, 1, 0, 2, 0]])
    world.drain()
    assert [event.data for event in story.events] == [b"a", b"", b"", b""]
    assert (story.ids(0), story.text(0)) == ((0, 1, 0, 2), b"a")
    assert story.finish_reasons(0) == [FinishReason.STOP]


def test_what_is_held_back_comes_when_it_is_no_stop_string_after_all() -> None:
    sampling = SamplingParams(stop=(b"bb",), max_tokens=4, ignore_eos=True)
    story = _forced(World(make_limits()), [1, 0, 0, 1], sampling)
    assert [event.data for event in story.events] == [b"", b"ba", b"a", b"b"]
    assert story.finish_reasons(0) == [FinishReason.LENGTH]


def test_held_back_text_comes_at_an_end_token() -> None:
    story = _forced(World(make_limits()), [1, END_ID], SamplingParams(stop=(b"bb",)))
    assert story.text(0) == b"b"


def test_a_stop_string_beats_the_length() -> None:
    story = _forced(World(make_limits()), [0, 1], SamplingParams(stop=(b"ab",), max_tokens=2))
    assert story.finish_reasons(0) == [FinishReason.STOP]


def test_min_tokens_bans_the_ends_and_looks_for_stop_strings_after_them_only() -> None:
    world = World(make_limits())
    sampling = SamplingParams(min_tokens=2, stop=(b"a",), stop_token_ids=(5,), max_tokens=5)
    story = world.ask([1, 2, 3], sampling, forced=[[0, END_ID, 1, 0]])
    banned = []
    while (plan := world.step()) is not None:
        banned += [row.samples[0].banned_ids for row in plan.rows]
    assert banned == [(5, 6, 7), (5, 6, 7), (), ()]
    assert story.ids(0) == (0, END_ID, 1, 0)
    assert story.text(0) == b"ab"


def test_forced_tokens_come_first_and_then_the_models_own() -> None:
    world = World(make_limits())
    story = world.ask([1, 2, 3], length(5), forced=[[4, 4]])
    forced = []
    while (plan := world.step()) is not None:
        forced += [row.samples[0].forced for row in plan.rows]
    assert forced == [4, 4, None, None, None]
    assert story.ids(0)[:2] == (4, 4)


def test_omitted_max_tokens_ends_at_the_pool_or_the_context() -> None:
    world = World(make_limits(num_pages=5, page_size=4))
    story = world.ask([1] * 6, length(None))
    world.drain()
    assert story.usage.completion_tokens == 14
    world = World(make_limits(max_model_len=9))
    story = world.ask([1] * 6, length(None))
    world.drain()
    assert story.usage.completion_tokens == 3


def test_usage_times_the_phases() -> None:
    world = World(make_limits(max_num_seqs=1, max_batched_tokens=4))
    world.ask([1] * 4, length(3))
    story = world.ask([2] * 8, length(2))
    world.drain()
    assert (story.usage.queue_seconds, story.usage.prefill_seconds) == (4.0, 1.0)


def test_logprobs_are_handed_on() -> None:
    world = World(make_limits())
    world.ask([1, 2, 3], SamplingParams(max_tokens=1, top_logprobs=1))
    plan = world.scheduler.schedule()
    assert plan is not None
    logprob = TokenLogprob(4, -0.5, ((4, -0.5),))
    world.scheduler.commit(plan, StepResult(samples=((Sampled(4, logprob),),)))
    event = world.scheduler.take_events()[0]
    assert getattr(event, "logprobs", ()) == (logprob,)


def test_stats_add_up() -> None:
    world = World(make_limits())
    world.ask([1] * 9, length(3))
    world.drain()
    world.ask([1] * 9, length(4))
    world.drain()
    stats = world.scheduler.stats()
    assert (stats.prompt_tokens_computed, stats.prompt_tokens_cached) == (10, 8)
    assert (stats.generation_tokens, stats.steps, stats.preemptions, stats.recomputed_tokens) == (7, 7, 0, 0)
    assert stats.pages_free + stats.pages_cached + stats.pages_active == 64
    assert stats.pages_active == 0


# Cancelling


def _cancel_when(world: World, story: Story, steps: int, in_flight: bool) -> None:
    for _ in range(steps):
        world.step()
    if in_flight:
        world.step(lambda: world.cancel(story.request.request_id))
    else:
        world.cancel(story.request.request_id)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("n", [1, 3])
def test_cancel_ends_a_request_within_the_step_and_keeps_what_was_computed(steps: int, in_flight: bool, n: int) -> None:
    world = World(make_limits(max_batched_tokens=4))
    story = world.ask([1] * 8, length(10, n=n))
    _cancel_when(world, story, steps, in_flight)
    assert story.final is not None
    assert story.final.cancelled
    assert story.final.error is None
    assert world.scheduler.stats().pages_active == 0
    assert not world.scheduler.has_unfinished
    computed = min(8, 4 * (steps + in_flight))
    again = world.ask([1] * 9)
    world.drain()
    assert again.usage.cached_tokens == computed


def test_cancel_while_queued_and_while_waiting_for_a_prefix_in_flight() -> None:
    world = World(make_limits(max_batched_tokens=4))
    leader = world.ask([1] * 20)
    waiting = world.ask([1] * 20)
    world.step()
    queued = world.ask([2] * 20)
    world.cancel(waiting.request.request_id)
    world.cancel(queued.request.request_id)
    assert waiting.final is not None
    assert queued.final is not None
    world.drain()
    assert leader.usage.completion_tokens == 2


def test_cancel_when_some_choices_have_ended() -> None:
    world = World(make_limits())
    story = world.ask([1, 2, 3], SamplingParams(n=2, max_tokens=9), forced=[[0, END_ID], [1, 1, 1, 1, 1, 1, 1, 1]])
    for _ in range(3):
        world.step()
    world.cancel(story.request.request_id)
    assert story.finish_reasons(0) == [FinishReason.STOP]
    assert story.finish_reasons(1) == [FinishReason.CANCELLED]
    world.drain()


def test_cancel_of_unknown_ended_or_twice_is_ignored() -> None:
    world = World(make_limits())
    world.scheduler.cancel("nobody")
    story = world.ask([1, 2, 3], length(1))

    def cancel_twice() -> None:
        world.cancel(story.request.request_id)
        world.cancel(story.request.request_id)

    world.step(cancel_twice)
    world.cancel(story.request.request_id)
    world.drain()


# Misuse


def test_an_id_in_use_is_refused() -> None:
    world = World(make_limits())
    story = world.ask([1, 2, 3])
    with pytest.raises(ValueError, match="request id 'r0' is in use"):
        world.scheduler.add(story.request)
    world.drain()
    world.scheduler.add(story.request)


def test_steps_do_not_overlap_and_results_must_fit() -> None:
    world = World(make_limits())
    world.ask([1, 2, 3])
    plan = world.scheduler.schedule()
    assert plan is not None
    with pytest.raises(RuntimeError, match="step 1 is in flight"):
        world.scheduler.schedule()
    with pytest.raises(ValueError, match="does not have a draw for each sample spec"):
        world.scheduler.commit(plan, StepResult(samples=((),)))
    world.scheduler.commit(plan, StepResult(samples=((Sampled(1),),)))
    with pytest.raises(ValueError, match="step 1 is not in flight"):
        world.scheduler.commit(plan, StepResult(samples=((Sampled(1),),)))


def test_an_error_leaves_no_trace_of_a_refused_request() -> None:
    world = World(make_limits(max_model_len=3))
    story = world.submit(Request(request_id="r0", prompt_token_ids=(1, 2, 3), sampling=length(1)))
    assert story.final is not None
    assert story.final.error == "the prompt has 3 tokens and the context holds 3: no room for a completion"
    assert story.events == []
    assert not world.scheduler.has_unfinished
    assert world.scheduler.schedule() is None


@pytest.mark.parametrize(
    ("prompt", "sampling", "forced", "error"),
    [
        ([1], SamplingParams(n=0), [], "n is 0"),
        ([1], SamplingParams(n=2), [[1]], "forced_tokens are for 1 choices, n is 2"),
        ([1], SamplingParams(), [[1, 8]], "forced_tokens hold 8; accepted: ids below 8"),
        ([1], SamplingParams(stop=(b"",)), [], "accepted: non-empty ones"),
        ([1, -1], SamplingParams(max_tokens=1), [], "can't convert negative"),
    ],
)
def test_what_no_route_lets_through_ends_in_an_error_too(
    prompt: list[int], sampling: SamplingParams, forced: list[list[int]], error: str
) -> None:
    world = World(make_limits())
    story = world.ask(prompt, sampling, forced=forced)
    assert story.final is not None
    assert error in (story.final.error or "")
    assert not world.scheduler.has_unfinished
    assert world.step() is None


def test_check_sees_a_lost_sequence() -> None:
    world = World(make_limits())
    world.ask([1, 2, 3], length(5))
    world.step()
    world.running().clear()
    with pytest.raises(IntegrityError):
        world.scheduler.check()
