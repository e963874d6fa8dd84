"""The merge of splits in Triton's interpreter: against the formula in fp64, and its order by sums that show it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sapwood_kernels import reference_decode
from sapwood_kernels.config_table import INTERPRETER_ARCH
from sapwood_kernels.decode_layout import DecodeLayout
from sapwood_kernels.decode_work import DecodeWork, build_decode_work
from sapwood_kernels.merge_splits import merge_splits
from sapwood_kernels.partials import Partials
from sapwood_kernels.values import AttentionRule
from support.decode_checks import spread
from support.decode_runs import CPU, DecodeRun, assert_bits, decode, poisoned_partials
from support.isolated import run_isolated
from support.mutants import Mutant, survivors
from support.ops import assert_close, random_tensor
from support.paged_world import WorldShape, make_world
from support.scale import scaled

FP32 = torch.float32
RUN = DecodeRun()
RULE = AttentionRule(1.0)


def planned(num_keys: list[int], spare: int = 2) -> tuple[Tensor, DecodeWork]:
    """The lengths, and work for rows of these, of one head each and splits of 64 keys."""
    keys = torch.tensor(num_keys, dtype=torch.int32)
    table = torch.ones(len(num_keys), max(max(num_keys), 1), dtype=torch.int32)
    capacity = sum(-(-count // RUN.split_size) for count in num_keys) + spare
    layout = DecodeLayout(
        config=RUN.config, arch=INTERPRETER_ARCH, group=1, page_size=16, num_pages=2, capacity=capacity
    )
    work = DecodeWork.allocate(layout, len(num_keys), RUN.grid, CPU)
    work.load(build_decode_work(table.numpy(), keys.numpy(), layout))
    return keys, work


def random_partials(work: DecodeWork, num_heads: int, head_dim: int, written: int) -> Partials:
    """The first `written` ones as attention leaves them, NaN behind these."""
    partials = poisoned_partials(work.layout.capacity, num_heads, head_dim)
    partials.maximum[:written] = random_tensor(written, num_heads) * 20
    partials.total[:written] = random_tensor(written, num_heads, seed=1).abs() * 30 + 1
    partials.acc[:written] = random_tensor(written, num_heads, head_dim, seed=2) * 30
    return partials


def check_against_formula(
    num_keys: list[int], rule: AttentionRule, num_heads: int = 3, head_dim: int = 64, dtype: torch.dtype = FP32
) -> None:
    keys, work = planned(num_keys)
    written = sum(-(-count // 64) for count in num_keys)
    partials = random_partials(work, num_heads, head_dim, written)
    if rule.window is not None:
        for row, count in enumerate(num_keys):
            first = int(work.first_partial[row])
            for part in (partials.maximum, partials.total, partials.acc):
                part[first : first + max(count - rule.window, 0) // 64] = float("nan")
    out, lse = merge_splits(partials, keys, work, rule, dtype)
    wanted_out, wanted_lse = reference_decode.merge_splits(partials, keys, work, rule, dtype)
    assert_close(out, wanted_out, factor=2)
    real = keys > 0
    assert_close(lse[real], wanted_lse[real], factor=2)
    assert torch.equal(lse[~real], wanted_lse[~real])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_merge_is_the_formula(head_dim: int, dtype: torch.dtype) -> None:
    check_against_formula([1, 64, 65, 200], RULE, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("window", [1, 63, 64, 65, 500])
def test_splits_before_a_window_are_not_read(window: int) -> None:
    check_against_formula([1, 64, 65, 129, 200], replace(RULE, window=window))


@pytest.mark.parametrize("num_heads", [1, 5, 32])
def test_a_sink_counts_once_whatever_the_splits(num_heads: int) -> None:
    check_against_formula([1, 64, 200], replace(RULE, sinks=random_tensor(num_heads, seed=3) * 5), num_heads)


@pytest.mark.parametrize("sinks", [None, torch.tensor([2.0, -1.0])])
def test_a_row_without_keys_gives_zeros_and_leaves_its_neighbours(sinks: Tensor | None) -> None:
    rule = replace(RULE, sinks=sinks)
    keys, work = planned([0, 70, 0])
    partials = random_partials(work, 2, 64, 2)
    out, lse = merge_splits(partials, keys, work, rule, FP32)
    assert torch.equal(out[[0, 2]], torch.zeros(2, 2, 64))
    assert torch.equal(lse[[0, 2]], torch.full((2, 2), float("-inf")))
    check_against_formula([0, 70, 0], rule, num_heads=2)


def check_order() -> None:
    """In fp32, `1 + 2 ** 25 - 2 ** 25 + 1` is 1 from the left, and so is it from the right; `2 ** 25 - 2 ** 25 + 1` is
    1 from the left and 0 from the right, and 0 if the last two are added first."""
    for values, total in (([1.0, 2.0**25, -(2.0**25), 1.0], 1.0), ([2.0**25, -(2.0**25), 1.0], 1.0)):
        keys, work = planned([64 * len(values)])
        partials = poisoned_partials(work.layout.capacity, 1, 64)
        partials.maximum[: len(values)], partials.total[: len(values)] = 0.0, 1.0
        partials.acc[: len(values)] = torch.tensor(values)[:, None, None]
        out, lse = merge_splits(partials, keys, work, RULE, FP32)
        assert_close(out, torch.full((1, 1, 64), total / len(values)))
        assert_close(lse, torch.full((1, 1), math.log(len(values))))


def test_splits_fold_from_the_left() -> None:
    check_order()


def check_lse_is_natural() -> None:
    """Of attention itself, against fp64: two keys whose scores are 1 and 3."""
    world = make_world([2], WorldShape(num_heads=1, num_kv_heads=1))
    world.queries[0][:] = 0.0
    world.queries[0][..., 0] = 1.0
    world.kv[world.block_table[0, 0], 0, 0, :2, 0] = torch.tensor([1.0, 3.0])
    lse = decode(world, replace(RUN, rule=RULE)).lse
    assert_close(lse, torch.tensor([[math.log(math.exp(1) + math.exp(3))]]))


def test_lse_is_a_natural_logarithm() -> None:
    check_lse_is_natural()


def check_far_partials() -> None:
    """The same merge where partials, or their heads, lie 2 ** 31 elements apart."""
    keys, work = planned([64 * 3], spare=0)
    near = random_partials(work, 3, 64, 3)
    wanted = merge_splits(near, keys, work, RULE, FP32)
    sizes = {"maximum": spread(near.maximum, 0), "total": spread(near.total, 0)}
    for far in (replace(near, acc=spread(near.acc, 0)), replace(near, acc=spread(near.acc, 1)), replace(near, **sizes)):
        assert_bits(merge_splits(far, keys, work, RULE, FP32), wanted)


def test_no_partials_are_too_far_for_32_bits() -> None:
    """A wrong offset ends the process."""
    run_isolated(check_far_partials)


def test_what_does_not_fit_is_refused() -> None:
    keys, work = planned([70, 1])
    partials = random_partials(work, 2, 64, 3)
    for message, changes in (
        ("partials.acc is on meta", {"partials": replace(partials, acc=partials.acc.to("meta"))}),
        ("first_partial is on meta", {"work": replace(work, first_partial=work.first_partial.to("meta"))}),
        ("sinks is on meta", {"rule": replace(RULE, sinks=torch.zeros(2, device="meta"))}),
        ("num_keys is torch.int64", {"num_keys": keys.long()}),
        ("first_partial has 2 rows; accepted: 3 or more", {"num_keys": torch.cat((keys, keys[:1]))}),
        ("sinks has shape", {"rule": replace(RULE, sinks=torch.zeros(3))}),
        ("sinks is torch.float16", {"rule": replace(RULE, sinks=torch.zeros(2).half())}),
        ("dtype is torch.int32", {"dtype": torch.int32}),
        ("partials.acc has strides", {"partials": replace(partials, acc=partials.acc.mT.contiguous().mT)}),
        ("partials.total has shape", {"partials": replace(partials, total=partials.total[:, :1])}),
        ("partials.total has strides", {"partials": replace(partials, total=partials.total.contiguous())}),
    ):
        arguments = {"partials": partials, "num_keys": keys, "work": work, "rule": RULE, "dtype": FP32} | changes
        with pytest.raises(ValueError, match=message):
            merge_splits(**arguments)  # type: ignore[arg-type]


def checks(module: ModuleType) -> None:
    """What the mutants must not get past. (The module is broken wherever it is imported.)"""
    check_lse_is_natural()
    check_order()
    check_against_formula(
        [0, 1, 64, 65, 200], replace(RULE, window=70, sinks=torch.tensor([1.0, -2.0, 4.0])), head_dim=80
    )
    check_against_formula([65, 0, 130], RULE)
    check_far_partials()


def mutant(old: str, new: str) -> Mutant:
    return Mutant("sapwood_kernels.merge_splits", old, new)


MUTANTS = [
    mutant("tl.range(first_split, tl", "tl.range(first_split + 1, tl"),  # skips a split
    mutant("tl.cdiv(keys, SPLIT_SIZE)", "keys // SPLIT_SIZE"),  # forgets the last one
    mutant("tl.maximum(keys - WINDOW, 0) // SPLIT_SIZE", "0 * (keys - WINDOW)"),  # reads what the window hides
    mutant("tl.load(sinks + head) * LOG2_E", "tl.load(sinks + head)"),  # a sink in the wrong base
    mutant("/ LOG2_E)", "* LOG2_E)"),
    mutant("(maximum + tl.log2(total)) / LOG2_E", "maximum + tl.log2(total)"),
    mutant("head * acc_head_stride", "head * maximum_stride"),
    mutant("* acc_stride + head", "* maximum_stride + head"),
    mutant("tl.load(first_partial + row).to(tl.int64)", "tl.load(first_partial + row)"),  # offsets in 32 bits
    mutant("tl.program_id(1).to(tl.int64)", "tl.program_id(1)"),  # the same
    mutant("empty = keys == 0", "empty = keys < 0"),
    mutant("tl.load(partial_total + where),", "tl.load(partial_maximum + where),"),
    mutant(
        "        where = (number + split)",
        "        split = first_split + tl.cdiv(keys, SPLIT_SIZE) - 1 - split\n        where = (number + split)",
    ),  # from the right
    Mutant("sapwood_kernels.fold", "tl.fma(acc, tl.expand_dims(alpha, -1), other_acc", "tl.fma(acc, 1.0, other_acc"),
    Mutant("sapwood_kernels.fold", "beta = tl.exp2(other_maximum - base)", "beta = tl.exp2(other_maximum - maximum)"),
]


def test_the_checks_notice_a_broken_kernel() -> None:
    chosen = MUTANTS[:: len(MUTANTS) // scaled(len(MUTANTS), 4)]
    assert survivors(chosen, checks) == []
