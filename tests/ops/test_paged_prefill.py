"""Prefill attention in Triton's interpreter: against the formula, and against itself in other ways, bit by bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sapwood_kernels.attention_check import FP8
from sapwood_kernels.config_table import AttentionConfig
from sapwood_kernels.paged_prefill import paged_prefill
from sapwood_kernels.prefill_work import PrefillWork
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, KVScales, PagedBatch
from support.isolated import run_isolated
from support.mutants import Mutant, survivors
from support.paged_world import Chunk, SharedPrefix, WorldShape, make_world
from support.prefill_runs import Op, PrefillRun, assert_answers, assert_bits, attend, formula, padded, plan, prefill
from support.scale import scaled

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
GROUPS = (1, 3, 4, 5, 8, 12, 16, 24, 32)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
PAGE_SIZES = (16, 32, 64)
DTYPES = ((FP16, None), (FP32, None), (BF16, None), (BF16, FP8), (FP16, FP8))
RULES = (
    AttentionRule(0.125),
    AttentionRule(0.1, window=17),
    AttentionRule(0.3, softcap=4.0),
    AttentionRule(0.2, window=40, softcap=2.5),
)
ONE_HEAD = WorldShape(num_heads=1, num_kv_heads=1, dtype=FP16)
GROUP_OF_3 = WorldShape(num_heads=3, num_kv_heads=1, dtype=FP16)
PROMPT = 96
# Those at the edges of pages (16) and tiles (32) first, for the slice of them that short runs take.
SPLITS = sorted(range(1, PROMPT), key=lambda split: (split not in (1, 31, 32, 33, 48, 95), split * 37 % 97))

# The interpreter's exp2 warns when it overflows; the formula of the softcap is made for that.
overflows = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")


def matrix_case(number: int) -> tuple[WorldShape, PrefillRun, list[int], list[int]]:
    """Of 3,780: 9 groups, 7 head dims, 5 dtypes and 4 rules have no common divisor, so each meets every other. Lengths
    end 0, 1 and 15 slots into a page; of each sequence the last queries are asked."""
    group = GROUPS[number % 9]
    dtype, kv_dtype = DTYPES[number % 5]
    page_size = PAGE_SIZES[number // 9 % 3]
    shape = WorldShape(
        num_heads=2 * group,
        head_dim=HEAD_DIMS[number % 7],
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        scales=KVScales(0.37, 2.9) if kv_dtype else UNIT_SCALES,
    )
    rule = RULES[number % 4]
    if number % 3 == 1:
        rule = replace(rule, sinks=torch.linspace(-2, 2, shape.num_heads))
    block_m = 64 if group > 16 else 32
    lengths = [1 + number % 17, page_size + (0, 1, 15)[number % 3], 70]
    return shape, PrefillRun(rule=rule, block_m=block_m, block_n=(16, 32)[number % 2]), lengths, [17, 9, 5]


@overflows
@pytest.mark.parametrize("number", range(scaled(252, 14)))
def test_matrix(number: int) -> None:
    shape, run, lengths, counts = matrix_case(number)
    world = make_world(lengths, shape, seed=number, strided=number % 2 == 1)
    chunks = [
        Chunk(i, max(length - count, 0), length) for i, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    assert_answers(prefill(world, run, chunks), formula(world, run, chunks))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_sequences_shorter_than_a_page(page_size: int) -> None:
    world = make_world(range(1, scaled(17, 5) + 1), replace(ONE_HEAD, page_size=page_size))
    assert_answers(prefill(world, PrefillRun()), formula(world, PrefillRun()))


def check_ragged(op: Op) -> None:
    """Whole prompts, chunks on a prefix, single tokens and a sequence without a query, in one batch."""
    run = PrefillRun(op=op, rule=AttentionRule(0.2, window=20, softcap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0] * 2)))
    shape = WorldShape(num_heads=6, num_kv_heads=2, head_dim=80, dtype=FP16)
    world = make_world([33, 50, 70, 16], shape, shared={2: SharedPrefix(1, 32)}, strided=True)
    world.kv[0] = float("nan")  # nobody reads the reserved page, even where the answer is multiplied by zero
    chunks = [Chunk(1, 40, 50), Chunk(0, 0, 33), Chunk(3, 7, 7), Chunk(2, 69, 70)]
    assert_answers(prefill(world, run, chunks), formula(world, run, chunks))
    plain = replace(run, rule=AttentionRule(0.125))
    assert_answers(prefill(world, plain, chunks), formula(world, plain, chunks))


def test_a_ragged_batch() -> None:
    check_ragged(paged_prefill)


def check_every_split(op: Op, splits: list[int], rule: AttentionRule) -> None:
    """A prompt in two chunks: the first sees none of the keys to come, which are NaN; the second reads the first one's
    keys from pages. The same bits as in one chunk, row for row."""
    world = make_world([PROMPT], replace(ONE_HEAD, num_heads=2))
    run = PrefillRun(op=op, rule=rule)
    whole = prefill(world, run)
    for split in splits:
        uncached = prefill(world.forget(0, slice(split, None)), run, [Chunk(0, 0, split)])
        cached = prefill(world, run, [Chunk(0, split, PROMPT)])
        assert_bits(torch.cat((uncached, cached)), whole)


@pytest.mark.parametrize("rule", [RULES[0], RULES[3]], ids=["plain", "window and softcap"])
def test_cached_is_uncached_at_every_split(rule: AttentionRule) -> None:
    check_every_split(paged_prefill, SPLITS[: scaled(len(SPLITS), 6)], rule)


@settings(max_examples=scaled(40, 4))
@given(cuts=st.sets(st.integers(1, 69), max_size=4), window=st.sampled_from([None, 1, 15, 33]))
def test_any_chunks_give_the_same_bits(cuts: set[int], window: int | None) -> None:
    world = make_world([70], ONE_HEAD)
    run = PrefillRun(rule=AttentionRule(0.3, window=window))
    ends = [0, *sorted(cuts), 70]
    chunks = [Chunk(0, start, stop) for start, stop in itertools.pairwise(ends)]
    assert_bits(torch.cat([prefill(world, run, [chunk]) for chunk in chunks]), prefill(world, run))


def test_batch_mates_change_no_bit() -> None:
    world = make_world([1 + 5 * number for number in range(17)], GROUP_OF_3)
    chunks = [Chunk(i, max(chunk.stop - 7, 0), chunk.stop) for i, chunk in enumerate(world.whole())]
    counts = [chunk.stop - chunk.start for chunk in chunks]
    together = torch.split(prefill(world, PrefillRun(), chunks), counts)
    for number in (0, 3, 8, 16):
        assert_bits(prefill(world, PrefillRun(), [chunks[number]]), together[number])


@pytest.mark.parametrize("rule", [RULES[0], RULES[3]], ids=["plain", "window and softcap"])
def test_other_blocks_of_queries_change_no_bit(rule: AttentionRule) -> None:
    """fp16: numpy's product of fp16 matrices has one order of sums for every number of rows; that of fp32 has not."""
    world = make_world([50, 33], GROUP_OF_3)
    wanted = prefill(world, PrefillRun(rule=rule, block_m=16))
    for block_m in (32, 64, 128):
        assert_bits(prefill(world, PrefillRun(rule=rule, block_m=block_m)), wanted)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_where_pages_lie_changes_no_bit(page_size: int) -> None:
    one, other = (make_world([40, 65], replace(ONE_HEAD, page_size=page_size), placement=i) for i in (1, 2))
    assert not torch.equal(one.block_table, other.block_table)
    assert_bits(prefill(one, PrefillRun()), prefill(other, PrefillRun()))


def check_window(op: Op, window: int) -> None:
    """Pages that a window has left are freed: their slots are NaN, and the table no longer names them."""
    world = make_world([90], GROUP_OF_3)
    run = PrefillRun(op=op, rule=AttentionRule(0.125, window=window))
    chunk = Chunk(0, 70, 90)
    wanted = formula(world, run, [chunk])
    left = max(70 - window + 1, 0)
    freed = world.forget(0, slice(0, left)).without_pages(0, left // 16)
    assert_answers(prefill(freed, run, [chunk]), wanted)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 33, 64, 70, 90, 1000])
def test_windows(window: int) -> None:
    check_window(paged_prefill, window)


def test_a_window_of_one_gives_the_tokens_own_value() -> None:
    world = make_world([20], replace(ONE_HEAD, dtype=FP32))
    pages = world.block_table[0, :2].long()
    values = world.kv[pages, 1, 0].flatten(0, 1)[:20]
    assert_bits(prefill(world, PrefillRun(rule=AttentionRule(0.125, window=1)))[:, 0], values)


@overflows
@pytest.mark.parametrize("logit", [5e3, 1e5])
def test_a_softcap_bears_large_logits(logit: float) -> None:
    """exp(2 x) overflows from x = 44 on. All elements are 1 or -1, so that products are exact: a rounding of 1e-7 of a
    score of 1e5 would be 0.01."""
    world = make_world([40], replace(ONE_HEAD, dtype=FP32))
    world = replace(world, kv=world.kv / world.kv.abs(), queries=(world.queries[0] / world.queries[0].abs(),))
    run = PrefillRun(rule=AttentionRule(logit / 8, softcap=30.0))
    assert_answers(prefill(world, run), formula(world, run))


def test_sinks_are_each_heads_own() -> None:
    world = make_world([20], replace(GROUP_OF_3, num_heads=6, num_kv_heads=2, dtype=FP32))
    sinks = torch.tensor([-1e9, 0.0, 2.0, 40.0, -3.0, float("-inf")])
    run = PrefillRun(rule=AttentionRule(0.125, sinks=sinks))
    found = prefill(world, run)
    assert_answers(found, formula(world, run))
    assert float(found[:, 3].abs().max()) < 1e-10


def check_scales(op: Op, dtype: torch.dtype) -> None:
    shape = replace(GROUP_OF_3, dtype=dtype, kv_dtype=FP8, scales=KVScales(0.37, 2.9))
    world = make_world([17, 40], shape)
    run = PrefillRun(op=op)
    assert_answers(prefill(world, run), formula(world, run))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_scales_of_8_bit_pages(dtype: torch.dtype) -> None:
    check_scales(paged_prefill, dtype)


def check_empty_sequences(op: Op) -> None:
    """Queries without keys, as padding has them, give zeros, and their neighbours the bits they have alone."""
    world = make_world([20, 33], GROUP_OF_3)
    run = PrefillRun(op=op)
    batch, q = padded(world.batch(world.whole()), 5), world.q(world.whole())
    found = attend(world, run, torch.cat((q, torch.full((5, *q.shape[1:]), float("nan"), dtype=FP16))), batch)
    assert torch.equal(found[-5:], torch.zeros_like(found[-5:]))
    assert_bits(found[:-5], prefill(world, run))


def test_sequences_without_keys() -> None:
    check_empty_sequences(paged_prefill)


@pytest.mark.parametrize("sinks", [None, torch.zeros(3)], ids=["", "sinks"])
def test_more_queries_than_keys(sinks: Tensor | None) -> None:
    """The first queries stand before position 0 and see nothing."""
    world = make_world([20], GROUP_OF_3)
    run = PrefillRun(rule=AttentionRule(0.125, sinks=sinks, window=40))
    q = torch.cat((world.queries[0], world.queries[0]))
    batch = replace(world.batch(world.whole()), first_query=torch.tensor([0, 40], dtype=torch.int32))
    found = attend(world, run, q, batch)
    assert torch.equal(found[:20], torch.zeros_like(found[:20]))
    assert_bits(found[20:], prefill(world, run))


@pytest.mark.parametrize("num_queries", [[], [0, 0]])
def test_no_queries_at_all(num_queries: list[int]) -> None:
    world = make_world([20, 20], GROUP_OF_3)
    chunks = [Chunk(i, 20 - count, 20) for i, count in enumerate(num_queries)]
    batch = replace(
        world.batch([*chunks, Chunk(0, 20, 20)]), first_query=torch.zeros(len(chunks) + 2, dtype=torch.int32)
    )
    assert attend(world, PrefillRun(), world.queries[0][:0], batch).shape == (0, 3, 64)


@pytest.mark.parametrize("group", [3, 12, 24])
def test_a_padded_group_bleeds_into_no_other_head(group: int) -> None:
    """24 of 32 padded heads: the last eight would be the next key-value head's first."""
    world = make_world([20], WorldShape(num_heads=2 * group, dtype=FP16))
    run = PrefillRun(block_m=32)
    wanted = prefill(world, run)
    world.kv[:, :, 1] = float("nan")
    found = prefill(world, run)
    assert_bits(found[:, :group], wanted[:, :group])
    assert torch.isnan(found[:, group:]).all()


def check_far_pages() -> None:
    """Offsets of more than 2 ** 31 elements, from small strides and large ids, and from a stride that large."""
    world = make_world([20, 40], ONE_HEAD)
    wanted = prefill(world, PrefillRun())
    few = world.kv.shape[0]
    num_pages = 2**31 // world.kv.stride(0) + few + 1
    far = torch.empty(num_pages, *world.kv.shape[1:], dtype=FP16)
    far[-few:] = world.kv
    table = world.block_table + (num_pages - few)
    assert_bits(prefill(replace(world, kv=far, block_table=table), PrefillRun()), wanted)
    values_behind_keys = torch.empty(2**32, dtype=FP16).as_strided(world.kv.shape, (1024, 2**31, 1024, 64, 1))
    values_behind_keys.copy_(world.kv)
    assert_bits(prefill(replace(world, kv=values_behind_keys), PrefillRun()), wanted)


def check_far_rows() -> None:
    """Queries and outputs past 2 ** 31 elements, and rows of a table as far apart."""
    world = make_world([40], WorldShape(num_heads=32, num_kv_heads=1, dtype=FP16))
    run = PrefillRun(block_m=64)
    wanted = prefill(world, run)
    before = 2**31 // world.queries[0].stride(0) + 1
    q = torch.empty(before + 40, *wanted.shape[1:], dtype=FP16)
    q[before:] = world.queries[0]
    table = torch.empty(2**32, dtype=torch.int32).as_strided((2, 4), (2**31 + 64, 1))
    table[1] = world.block_table[0]
    batch = PagedBatch(table, torch.tensor([0, 40]).int(), torch.tensor([0, before, before + 40]).int())
    items = torch.stack((torch.ones(20), torch.arange(20)), dim=1).int()
    work = PrefillWork(items, torch.tensor([20]).int(), 20, run.config, 0)
    assert_bits(paged_prefill(q, world.kv, batch, work, run.rule)[before:], wanted)


@pytest.mark.parametrize("check", [check_far_pages, check_far_rows])
def test_offsets_past_2_to_the_31_elements(check: object) -> None:
    run_isolated(check)  # type: ignore[arg-type]


CONFIG = AttentionConfig(block_m=32, block_n=32, num_warps=4, num_stages=1, max_registers=255)


def refused(message: str, **changes: object) -> None:
    """A launch with some inputs exchanged raises before anything runs."""
    world = make_world([20, 70], GROUP_OF_3)
    batch = world.batch(world.whole())
    inputs = {"q": world.q(world.whole()), "kv": world.kv, "batch": batch, "work": plan(world, PrefillRun(), batch)}
    with pytest.raises(ValueError, match=message):
        paged_prefill(**(inputs | {"rule": AttentionRule(0.125)} | changes))  # type: ignore[arg-type]


def test_the_work_must_be_on_the_device_and_fit_the_grid() -> None:
    world = make_world([20, 70], GROUP_OF_3)
    work = plan(world, PrefillRun(), world.batch(world.whole()))
    refused("count is 99; accepted: 0 to num_blocks", work=replace(work, count=torch.tensor([99], dtype=torch.int32)))
    refused("items is on meta; accepted: cpu", work=replace(work, items=work.items.to("meta")))
    refused(
        "group is 32; accepted: 1 to block_m, 16",
        work=replace(work, config=replace(CONFIG, block_m=16)),
        q=torch.zeros(90, 32, 64, dtype=FP16),
    )


MUTANTS = [
    Mutant("sapwood_kernels.paged_prefill", old=old, new=new)
    for old, new in (
        ("keys[None, :] <= position[:, None]", "keys[None, :] <= position[:, None] + 1"),
        ("keys[None, :] > position[:, None] - WINDOW", "keys[None, :] >= position[:, None] - WINDOW"),
        ("tl.load(table + keys // PAGE_SIZE", "tl.load(table + (keys // PAGE_SIZE + 1)"),
        ("slot * stride_slot", "slot * stride_kind"),
        ("        mask = mask & is_key[:, None]\n", "        pass\n"),
        ("is_key = is_key & (keys >= begin)", "is_key = is_key & (keys >= 0)"),
        ("diagonal, end, BLOCK_N", "diagonal, end - 1, BLOCK_N"),
        ("tl.range(whole, diagonal, BLOCK_N)", "tl.range(whole + context % BLOCK_N, diagonal, BLOCK_N)"),
        (
            "query, head < GROUP, dims < HEAD_DIM)\n    where = token * stride_out",
            "query, head < 99, dims < HEAD_DIM)\n    where = token * stride_out",
        ),
        ("(query < num_queries) & is_head", "is_head"),
        ("rule.scale * LOG2_E * scales.key", "rule.scale * LOG2_E"),
        ("        scales.value,\n", "        1.0,\n"),
        ("if WINDOW < BLOCK_Q + BLOCK_N else 0", "if WINDOW < 0 else 0"),
        ("if item >= tl.load(count):", "if item > tl.load(count):"),
        ("total == 0.0, 1.0, total", "total == 7.0, 1.0, total"),
    )
]


def checks(module: ModuleType) -> None:
    """Of the kernel, in as few runs as notice every mutant."""
    op: Op = module.paged_prefill
    check_ragged(op)
    check_window(op, 17)
    check_scales(op, FP16)
    check_empty_sequences(op)
    check_every_split(op, [33], RULES[0])


def test_the_checks_notice_a_broken_kernel() -> None:
    assert survivors(MUTANTS[: scaled(len(MUTANTS), 4)], checks) == []
