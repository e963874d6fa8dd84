"""What decode attention must do, as checks: its tests run them, and so do its mutants, which must not get past them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sapwood_kernels.paged_decode import paged_decode
from sapwood_kernels.partials import Partials
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, KVScales
from support.decode_runs import DecodeInputs, DecodeRun, assert_answers, assert_bits, decode, decode_inputs, formula
from support.paged_world import Chunk, PagedWorld, SharedPrefix, WorldShape, make_world

FP8 = torch.float8_e4m3fn
FP16 = torch.float16
RULES = (
    AttentionRule(0.125),
    AttentionRule(0.1, window=50),
    AttentionRule(0.3, softcap=4.0),
    AttentionRule(0.2, window=17, softcap=2.5),
)
PLAIN = DecodeRun()
GROUP_OF_3 = WorldShape(num_heads=3, num_kv_heads=1, dtype=FP16)


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
    wide, narrow, lone = (
        decode(world, run) for run in (PLAIN, replace(PLAIN, wide=False), replace(PLAIN, group=False))
    )
    counts = [(len(way.lists.wide_items), len(way.lists.items)) for way in (wide, narrow, lone)]
    assert counts == [(1, 9), (0, 11), (0, 18)]
    for row in range(8):
        assert_bits(wide.of_row(row), narrow.of_row(row))
        assert_bits(wide.of_row(row), lone.of_row(row))


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


def launch(inputs: DecodeInputs, rule: AttentionRule = PLAIN.rule, scales: KVScales = UNIT_SCALES) -> None:
    paged_decode(inputs.q, inputs.kv, inputs.batch, inputs.work, rule, scales, inputs.partials)


def check_stale_items() -> None:
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


def check_bleeding() -> None:
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


def spread(tensor: Tensor, dim: int) -> Tensor:
    """The same values where the last ones along `dim` lie 2 ** 31 elements behind the first, none of the steps being
    that large. What lies between is memory that nobody touches."""
    sizes = list(tensor.shape)
    step = 16 * math.ceil(2**31 / (16 * (sizes[dim] - 1)))
    rest = [1 if other == dim else size for other, size in enumerate(sizes)]
    strides = list(torch.empty(rest, device="meta").stride())
    strides[dim] = step
    memory = torch.empty((sizes[dim] - 1) * step + math.prod(rest), dtype=tensor.dtype)
    return memory.as_strided(sizes, strides).copy_(tensor)


def check_far(name: str, dim: int) -> None:
    """The partials are the same where one dimension of one tensor is wider than 32 bits can count."""
    world = make_world([20, 65, 18], WorldShape(num_heads=3, num_kv_heads=3, dtype=FP16))
    run = replace(PLAIN, spare=0)
    near = decode_inputs(world, run)
    launch(near)
    blank = decode_inputs(world, run)
    partials = blank.partials
    if name == "kv":
        far = replace(blank, kv=spread(blank.kv, dim))
    elif name == "q":
        far = replace(blank, q=spread(blank.q, dim))
    elif name == "block_table":
        far = replace(blank, batch=replace(blank.batch, block_table=spread(blank.batch.block_table, dim)))
    elif name == "acc":
        far = replace(blank, partials=replace(partials, acc=spread(partials.acc, dim)))
    else:
        sizes = {"maximum": spread(partials.maximum, dim), "total": spread(partials.total, dim)}
        far = replace(blank, partials=replace(partials, **sizes))
    launch(far)
    for part in ("maximum", "total", "acc"):
        assert_bits((getattr(far.partials, part),), (getattr(near.partials, part),))


FAR = (("kv", 0), ("kv", 2), ("kv", 3), ("q", 0), ("q", 1), ("block_table", 0), ("acc", 0), ("acc", 1), ("sizes", 0))


def check_far_tensors() -> None:
    for name, dim in FAR:
        check_far(name, dim)
