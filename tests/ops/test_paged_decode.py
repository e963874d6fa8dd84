"""Decode attention in Triton's interpreter: against the formula, and against itself in other ways, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_kernels.values import UNIT_SCALES, AttentionRule, KVScales
from support.decode_checks import (
    FP8,
    FP16,
    GROUP_OF_3,
    PLAIN,
    RULES,
    check_bleeding,
    check_family,
    check_far_tensors,
    check_lengths_of_one_table,
    check_page_0,
    check_scales,
    check_stale_items,
    check_ways_agree,
    check_window,
    family,
    launch,
)
from support.decode_runs import DecodeRun, assert_answers, assert_bits, decode, decode_inputs, formula
from support.isolated import run_isolated
from support.paged_world import Chunk, PagedWorld, SharedPrefix, WorldShape, make_world
from support.scale import scaled

GROUPS = (1, 3, 5, 7, 8, 12, 16, 24, 32)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
PAGE_SIZES = (16, 32, 64)
DTYPES = ((FP16, None), (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, FP8), (FP16, FP8))


def matrix_case(number: int) -> tuple[WorldShape, DecodeRun]:
    """Of 3,780: 9 groups, 7 head dims, 5 dtypes and 4 rules have no common divisor, so each meets every other."""
    group = GROUPS[number % 9]
    dtype, kv_dtype = DTYPES[number % 5]
    shape = WorldShape(
        num_heads=2 * group,
        head_dim=HEAD_DIMS[number % 7],
        page_size=PAGE_SIZES[number // 9 % 3],
        dtype=dtype,
        kv_dtype=kv_dtype,
        scales=KVScales(0.37, 2.9) if kv_dtype else UNIT_SCALES,
    )
    return shape, DecodeRun(rule=RULES[number % 4], block_m=32 if group > 16 else 16)


@pytest.mark.parametrize("number", range(scaled(180, 9)))
def test_matrix(number: int) -> None:
    """Rows of one key, of a page and a key, and of several splits; two that share their first split."""
    shape, run = matrix_case(number)
    shared = {3: SharedPrefix(2, 64)}
    world = make_world([1, shape.page_size + 1, 70, 130], shape, shared=shared, strided=number % 2 == 1)
    assert_answers(decode(world, run, padding=1), formula(world, run, padding=1), run.rule)


def test_family() -> None:
    check_family()


def test_ways_agree() -> None:
    check_ways_agree()


@st.composite
def group_trees(draw: st.DrawFn) -> PagedWorld:
    """Rows that each begin as an earlier one for some pages, or as none."""
    lengths = draw(st.lists(st.integers(1, 140), min_size=2, max_size=7))
    shared = {}
    for row in range(1, len(lengths)):
        parent = draw(st.integers(0, row - 1))
        most = min(lengths[parent], lengths[row]) // 16
        shared[row] = SharedPrefix(parent, 16 * draw(st.integers(0, most)))
    group = draw(st.sampled_from((1, 3, 8)))
    shape = WorldShape(num_heads=group, num_kv_heads=1, dtype=draw(st.sampled_from((FP16, torch.float32))))
    return make_world(lengths, shape, shared=shared, seed=draw(st.integers(0, 3)))


@settings(max_examples=scaled(100, 4))
@given(group_trees(), st.sampled_from(RULES), st.sampled_from((2, 4)))
def test_grouped_rows_have_the_bits_of_lone_ones(world: PagedWorld, rule: AttentionRule, row_blocks: int) -> None:
    run = DecodeRun(rule=rule, row_blocks=row_blocks)
    lone = decode(world, replace(run, group=False))
    for other in (run, replace(run, wide=False)):
        found = decode(world, other)
        for row in range(len(world.queries)):
            assert_bits(found.of_row(row)[:2], lone.of_row(row)[:2])
    assert_answers(lone, formula(world, run), rule)


@pytest.mark.parametrize("rule", RULES[::3])
def test_two_placements_have_equal_bits(rule: AttentionRule) -> None:
    run = replace(PLAIN, rule=rule)
    first, second = (decode(family(placement=placement), run) for placement in (0, 1))
    assert_bits((first.out, first.lse), (second.out, second.lse))


@pytest.mark.parametrize("num_programs", [1, 25])
def test_the_grid_changes_no_bits(num_programs: int) -> None:
    """One program for all items, and more programs than items."""
    world = make_world([150, 70, 130], GROUP_OF_3, shared={1: SharedPrefix(0, 64)})
    grid = replace(PLAIN.grid, num_programs=num_programs, wide_programs=num_programs)
    found, wanted = decode(world, replace(PLAIN, grid=grid)), decode(world, PLAIN)
    assert_bits((found.out, found.lse), (wanted.out, wanted.lse))


def test_a_batch_of_1_has_the_bits_of_one_of_17() -> None:
    lengths = [9 * row + 1 for row in range(17)]
    world = make_world(lengths, GROUP_OF_3, shared={row: SharedPrefix(row - 1, 64) for row in range(8, 17)})
    batch = decode(world, PLAIN)
    for row in range(0, 17, 17 // scaled(17, 4)):
        alone = decode(world, PLAIN, chunks=[Chunk(row, lengths[row] - 1, lengths[row])])
        assert_bits(batch.of_row(row), alone.of_row(0))


def test_page_sizes_have_equal_bits() -> None:
    """And so a slot is found again, whatever the size of a page."""
    lengths = [1, 15, 16, 17, 63, 64, 65, 129]
    answers = [decode(make_world(lengths, replace(GROUP_OF_3, page_size=size)), PLAIN) for size in PAGE_SIZES]
    for other in answers[1:]:
        assert_bits((other.out, other.lse), (answers[0].out, answers[0].lse))


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_is_its_neighbour(rule: AttentionRule) -> None:
    check_lengths_of_one_table(rule)


def test_sequences_shorter_than_a_page() -> None:
    world = make_world(range(1, 18), WorldShape(num_heads=2, num_kv_heads=1))
    assert_answers(decode(world, PLAIN), formula(world, PLAIN), PLAIN.rule)


WINDOWS = [(window, freed) for freed in (False, True) for window in (1, 15, 16, 17, 65, 1000)]


@pytest.mark.parametrize(("window", "freed"), WINDOWS[:: 12 // scaled(12, 6)])
def test_nothing_leaks_from_before_a_window(window: int, freed: bool) -> None:
    check_window(window, freed)


def test_a_list_of_the_widest_window_serves_a_narrower_one() -> None:
    run = DecodeRun(rule=AttentionRule(0.2, window=20), list_window=100)
    found, wanted = decode(family(), run), decode(family(), replace(run, list_window=None))
    assert_bits((found.out, found.lse), (wanted.out, wanted.lse))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("logit", [5e3, 1e5])
def test_a_softcap_does_not_overflow(logit: float) -> None:
    """`exp` of 88 times the cap would be infinite, and infinity over itself NaN."""
    world = make_world([40], WorldShape(num_heads=2, num_kv_heads=1))
    world = replace(world, queries=tuple(queries * logit for queries in world.queries))
    run = DecodeRun(rule=AttentionRule(1.0, softcap=30.0))
    found = decode(world, run)
    assert torch.isfinite(found.out).all()
    assert_answers(found, formula(world, run), run.rule)


@pytest.mark.parametrize("scales", [KVScales(0.37, 1.0), KVScales(1.0, 2.9), KVScales(0.37, 2.9)])
def test_scales_of_8_bit_pages(scales: KVScales) -> None:
    check_scales(scales)


def test_page_0_is_never_read_as_live() -> None:
    check_page_0()


def test_stale_items_past_the_counts_are_not_run() -> None:
    check_stale_items()


def test_a_group_bleeds_into_no_other_head() -> None:
    check_bleeding()


def test_no_tensor_is_too_large_for_32_bits() -> None:
    """Pages, heads, slots, rows and partials past 2 ** 31 elements. A wrong offset ends the process."""
    run_isolated(check_far_tensors)


def refused(message: str, **changes: object) -> None:
    """A launch with some inputs exchanged raises before anything runs."""
    inputs = decode_inputs(make_world([20, 70], GROUP_OF_3), PLAIN)
    rule = changes.pop("rule", PLAIN.rule)
    with pytest.raises(ValueError, match=message):
        launch(replace(inputs, **changes), rule)  # type: ignore[arg-type]
    assert torch.isnan(inputs.partials.acc).all()


def test_what_does_not_fit_is_refused() -> None:
    inputs = decode_inputs(make_world([20, 70], GROUP_OF_3), PLAIN)
    q, kv, work, partials = inputs.q, inputs.kv, inputs.work, inputs.partials
    refused(r"q has 3 rows for 2 sequences|first_query", q=torch.cat((q, q[:1])))
    refused("5 query heads over 2 key-value heads", q=q[:, :1].expand(-1, 5, -1), kv=kv.expand(-1, -1, 2, -1, -1))
    refused("groups of 3 heads", q=q[:, :2].contiguous())
    refused("kv is torch.float32", kv=kv.float())
    refused("kv has page_size 128", kv=kv.repeat(1, 1, 1, 8, 1))
    refused(r"accepted by this work: groups of 3 heads, \d+ pages of 16", kv=torch.cat((kv, kv[:1])))
    refused(r"items has shape", work=replace(work, items=work.items[:-1]))
    refused(r"rows is torch.int64", work=replace(work, rows=work.rows.long()))
    refused(r"wide_items has strides", work=replace(work, wide_items=torch.cat((work.items, work.items), 1)[:, :4]))
    refused("first_partial has 1 rows; accepted: 2 or more", work=replace(work, first_partial=work.first_partial[:1]))
    refused("partials.acc has room for 3", partials=replace(partials, acc=partials.acc[:3]))
    refused("partials.total is torch.float16", partials=replace(partials, total=partials.total.half()))
    windowed = replace(work, layout=replace(work.layout, window=30))
    refused("window is None; accepted by this work: up to 30", work=windowed)
    refused("window is 31; accepted by this work: up to 30", work=windowed, rule=AttentionRule(1.0, window=31))
    for name in ("items", "wide_items", "rows", "counts", "first_partial"):
        elsewhere = replace(work, **{name: getattr(work, name).to("meta")})
        refused(f"{name} is on meta; accepted: cpu", work=elsewhere)
    for name in ("maximum", "total", "acc"):
        refused(f"partials.{name} is on meta", partials=replace(partials, **{name: getattr(partials, name).to("meta")}))
    old = replace(work, layout=replace(work.layout, arch=80))
    refused("float8_e4m3fn on compute capability 80; accepted: 89 or newer", work=old, kv=kv.to(FP8))
