"""Decode attention in Triton's interpreter: against the formula, and against itself in other ways, bit by bit."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sapwood_kernels.paged_decode import paged_decode
from sapwood_kernels.partials import Partials
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, KVScales
from support.decode_runs import DecodeInputs, DecodeRun, assert_answers, assert_bits, decode, decode_inputs, formula
from support.mutants import Mutant, survivors
from support.paged_world import Chunk, PagedWorld, SharedPrefix, WorldShape, make_world
from support.scale import scaled

FP8 = torch.float8_e4m3fn
FP16 = torch.float16
GROUPS = (1, 3, 5, 7, 8, 12, 16, 24, 32)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
PAGE_SIZES = (16, 32, 64)
DTYPES = ((FP16, None), (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, FP8), (FP16, FP8))
RULES = (
    AttentionRule(0.125),
    AttentionRule(0.1, window=50),
    AttentionRule(0.3, softcap=4.0),
    AttentionRule(0.2, window=17, softcap=2.5),
)
PLAIN = DecodeRun()
LONE = DecodeRun(group=False)
NARROW = DecodeRun(wide=False)
GROUP_OF_3 = WorldShape(num_heads=3, num_kv_heads=1, dtype=FP16)


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


def family(shape: WorldShape = GROUP_OF_3, placement: int = 0) -> PagedWorld:
    """Six rows that share a split, four of these two splits, two more that share nothing, one of them of one key."""
    shared = {1: (0, 64), 2: (0, 128), 3: (0, 128), 4: (0, 128), 5: (1, 64)}
    lengths = [150, 70, 130, 128, 129, 65, 75, 1]
    prefixes = {row: SharedPrefix(*prefix) for row, prefix in shared.items()}
    return make_world(lengths, shape, shared=prefixes, placement=placement)


def check_family() -> None:
    world = family()
    assert_answers(decode(world, PLAIN, padding=2), formula(world, PLAIN, padding=2), PLAIN.rule)


def check_ways_agree() -> None:
    """One group's rows in wide items, in several items, and each by itself."""
    world = family()
    wide, narrow, lone = decode(world, PLAIN), decode(world, NARROW), decode(world, LONE)
    counts = [(len(way.lists.wide_items), len(way.lists.items)) for way in (wide, narrow, lone)]
    assert counts == [(1, 9), (0, 11), (0, 18)]
    for row in range(8):
        assert_bits(wide.of_row(row), narrow.of_row(row))
        assert_bits(wide.of_row(row), lone.of_row(row))


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


def check_lengths_of_one_table(rule: AttentionRule) -> None:
    """Rows of one sequence as it was and as it is, by the same pages: each sees its own keys of a shared item, in tiles
    that start where they would for it alone."""
    world = make_world([95], GROUP_OF_3)
    chunks = [Chunk(0, keys - 1, keys) for keys in (81, 95, 90, 95)]
    run = replace(PLAIN, rule=rule)
    found = decode(world, run, chunks)
    assert len(found.lists.items) == 2
    assert_answers(found, formula(world, run, chunks), rule)
    lone = decode(world, replace(run, group=False), chunks)
    assert_bits((found.out, found.lse), (lone.out, lone.lse))


@pytest.mark.parametrize("rule", RULES)
def test_a_row_that_is_its_neighbour(rule: AttentionRule) -> None:
    check_lengths_of_one_table(rule)


def test_sequences_shorter_than_a_page() -> None:
    world = make_world(range(1, 18), WorldShape(num_heads=2, num_kv_heads=1))
    assert_answers(decode(world, PLAIN), formula(world, PLAIN), PLAIN.rule)


def check_window(window: int, freed: bool) -> None:
    """Keys that no window reaches are NaN; freed: their pages are gone from the table as well."""
    lengths = [64, 115]
    world = make_world(lengths, GROUP_OF_3)
    for row, length in enumerate(lengths):
        hidden = max(length - window, 0)
        world = world.without_pages(row, hidden // 16) if freed else world
        world = world.forget(row, slice(0, hidden)) if not freed else world
    run = DecodeRun(rule=AttentionRule(0.2, window=window), list_window=window if freed else None)
    found = decode(world, run)
    assert torch.isfinite(found.out).all()
    assert_answers(found, formula(world, run), run.rule)


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


def check_scales(scales: KVScales) -> None:
    shape = WorldShape(num_heads=3, num_kv_heads=1, dtype=FP16, kv_dtype=FP8, scales=scales)
    world = make_world([20, 70], shape)
    found = decode(world, PLAIN)
    assert_answers(found, formula(world, PLAIN), PLAIN.rule)
    plain = decode(make_world([20, 70], replace(shape, kv_dtype=None, scales=UNIT_SCALES)), PLAIN)
    assert float((found.out - plain.out).abs().max()) < 0.1, "e4m3 keeps three bits of what was stored"


def check_page_0() -> None:
    world = make_world([20, 70], GROUP_OF_3)
    poisoned = replace(world, kv=world.kv.clone())
    poisoned.kv[0] = float("nan")
    found, wanted = decode(poisoned, PLAIN, padding=2), decode(world, PLAIN, padding=2)
    assert_bits((found.out, found.lse), (wanted.out, wanted.lse))


def test_page_0_is_never_read_as_live() -> None:
    check_page_0()


def launch(inputs: DecodeInputs, rule: AttentionRule = PLAIN.rule, scales: KVScales = UNIT_SCALES) -> None:
    paged_decode(inputs.q, inputs.kv, inputs.batch, inputs.work, rule, scales, inputs.partials)


def test_stale_items_past_the_counts_are_not_run() -> None:
    """A CUDA graph's programs for a larger batch find the last one's items behind this one's."""
    world = family()
    inputs = decode_inputs(world, PLAIN)
    inputs.work.counts.zero_()
    launch(inputs)
    assert torch.isnan(inputs.partials.acc).all()
    inputs.work.counts[0] = 1
    launch(inputs)
    row_start, n_rows, _, split = inputs.lists.items[0]
    written = [int(inputs.lists.first_partial[row]) + split for row in inputs.lists.rows[row_start:][:n_rows]]
    assert torch.nonzero(~torch.isnan(inputs.partials.maximum[:, 0])).flatten().tolist() == sorted(written)


def test_a_group_bleeds_into_no_other_head() -> None:
    """24 of 32 padded heads: the last eight would be the next key-value head's, or lie behind the last one."""
    world = make_world([33], WorldShape(num_heads=48, dtype=FP16))
    inputs = decode_inputs(world, DecodeRun(block_m=32))
    capacity = inputs.work.layout.capacity
    sizes, acc = torch.full((2, capacity, 64), float("nan")), torch.full((capacity, 64, 64), float("nan"))
    partials = Partials(maximum=sizes[0, :, :48], total=sizes[1, :, :48], acc=acc[:, :48])
    launch(replace(inputs, partials=partials))
    assert torch.isfinite(acc[0, :48]).all()
    assert torch.isnan(acc[:, 48:]).all()
    assert torch.isnan(sizes[:, :, 48:]).all()


def far_pool(kv: Tensor, num_pages: int) -> Tensor:
    """The pages of kv as the last ones of a pool of `num_pages`, of which only these are ever touched."""
    far = torch.empty(num_pages, *kv.shape[1:], dtype=kv.dtype)
    far[-kv.shape[0] :] = kv
    return far


def check_far_pages() -> None:
    """Offsets of more than 2 ** 31 elements, from small strides and large ids."""
    world = make_world([20, 65], WorldShape(num_heads=3, num_kv_heads=1, dtype=FP16))
    wanted = decode(world, PLAIN)
    num_pages = 2**31 // world.kv.stride(0) + world.kv.shape[0] + 1
    table = world.block_table + (num_pages - world.kv.shape[0])
    found = decode(replace(world, kv=far_pool(world.kv, num_pages), block_table=table), PLAIN)
    assert_bits((found.out, found.lse), (wanted.out, wanted.lse))


def check_far_rows_and_partials() -> None:
    """Queries, tables and partials whose rows lie 2 ** 28 elements apart: the ninth one's offset is 2 ** 31."""
    world = make_world([20] * 10, WorldShape(num_heads=3, num_kv_heads=1, dtype=FP16))
    inputs = decode_inputs(world, PLAIN)
    launch(inputs)
    rows, stride = 10, 2**28
    q = torch.empty(rows * stride, dtype=FP16).as_strided(inputs.q.shape, (stride, 64, 1))
    q.copy_(inputs.q)
    table = inputs.batch.block_table
    far_table = torch.empty(rows * stride, dtype=torch.int32).as_strided(table.shape, (stride, 1)).copy_(table)
    capacity = inputs.work.layout.capacity
    acc = torch.empty(capacity * stride).as_strided((capacity, 3, 64), (stride, 64, 1))
    far = replace(
        inputs,
        q=q,
        batch=replace(inputs.batch, block_table=far_table),
        partials=replace(inputs.partials, acc=acc),
    )
    launch(far)
    assert_bits((acc[:10].clone(),), (inputs.partials.acc[:10],))


def test_pages_past_2_to_the_31_elements() -> None:
    check_far_pages()


def test_rows_and_partials_past_2_to_the_31_elements() -> None:
    check_far_rows_and_partials()


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
    refused("partials.acc has room for 3", partials=dataclasses.replace(partials, acc=partials.acc[:3]))
    refused("partials.total is torch.float16", partials=dataclasses.replace(partials, total=partials.total.half()))
    windowed = replace(work, layout=replace(work.layout, window=30))
    refused("window is None; accepted by this work: up to 30", work=windowed)
    refused("window is 31; accepted by this work: up to 30", work=windowed, rule=AttentionRule(1.0, window=31))
    old = replace(work, layout=replace(work.layout, arch=80))
    refused("float8_e4m3fn on compute capability 80; accepted: 89 or newer", work=old, kv=kv.to(FP8))


def checks(module: ModuleType) -> None:
    """What the mutants must not get past, the cheapest first. (The module is broken wherever it is imported.)"""
    check_scales(KVScales(0.37, 2.9))
    check_lengths_of_one_table(RULES[0])
    check_lengths_of_one_table(RULES[1])
    check_page_0()
    check_window(17, freed=True)
    check_window(50, freed=False)
    check_far_pages()
    test_a_group_bleeds_into_no_other_head()
    test_stale_items_past_the_counts_are_not_run()
    check_family()
    check_ways_agree()


def mutant(old: str, new: str) -> Mutant:
    return Mutant("sapwood_kernels.paged_decode", old, new)


MUTANTS = [
    mutant(
        "tl.range(first_key // BLOCK_N * BLOCK_N,", "tl.range((first_key // BLOCK_N + 1) * BLOCK_N,"
    ),  # skips a tile
    mutant("tl.range(first_key // BLOCK_N * BLOCK_N,", "tl.range(first_key,"),  # tiles that start at a window
    mutant("keys[None, :] < row_keys[block][:, None]", "keys[None, :] < end_key"),  # no mask of a row's length
    mutant("- WINDOW)\n                scores", "- WINDOW + 1)\n                scores"),  # a window of one key less
    mutant("table + keys // PAGE_SIZE, mask", "table + (keys + 1) // PAGE_SIZE, mask"),  # a page shifted
    mutant("pages * page_stride", "pages * slot_stride"),
    mutant("kv_head * kv_head_stride", "kv_head * slot_stride"),
    mutant("its_keys + VALUE_STRIDE, mask=visible[:, None] & in_head", "its_keys + VALUE_STRIDE, mask=in_head"),
    mutant("(keys >= first_key) & (keys < end_key)", "keys < end_key"),
    mutant("row_start.to(tl.int64) + place, mask", "place, mask"),  # another item's rows
    mutant("tl.load(item + 2).to", "tl.load(item).to"),  # another row's table
    mutant("(0 if ROW_BLOCKS == 1 else 1)", "0"),  # the other list's count
    mutant("item = items + (job // num_kv_heads)", "item = items + (job % num_kv_heads)"),
    mutant(".to(tl.int64) + split\n", ".to(tl.int64)\n"),  # every split in one partial
    mutant("acc[block] * value_scale", "acc[block]"),
    mutant("rule.scale * scales.key * LOG2_E", "rule.scale * LOG2_E"),
    mutant("rule.scale * scales.key * LOG2_E", "rule.scale * scales.key"),
    mutant("real = row_is_real & (head_of_group < GROUP)", "real = row_is_real & (head_of_group < PADDED_GROUP)"),
    mutant("mask=visible, other=0).to(tl.int64)", "mask=visible, other=0)"),  # offsets in 32 bits
    mutant("maximum[block], total[block], acc[block]\n", "maximum[0], total[block], acc[block]\n"),
]


def test_the_checks_notice_a_broken_kernel() -> None:
    chosen = MUTANTS[:: len(MUTANTS) // scaled(len(MUTANTS), 5)]
    assert survivors(chosen, checks) == []
