"""Decode attention broken on purpose: its checks notice."""

from __future__ import annotations

from types import ModuleType

from sapwood_kernels.values import KVScales
from support.decode_checks import (
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
)
from support.mutants import Mutant, survivors
from support.scale import scaled


def checks(module: ModuleType) -> None:
    """What the mutants must not get past, the cheapest first. (The module is broken wherever it is imported.)"""
    check_scales(KVScales(0.37, 2.9))
    check_lengths_of_one_table(RULES[0])
    check_lengths_of_one_table(RULES[1])
    check_page_0()
    check_window(17, freed=True)
    check_window(50, freed=False)
    check_far_tensors()
    check_bleeding()
    check_stale_items()
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
    # Offsets in 32 bits.
    mutant("mask=visible, other=0).to(tl.int64)", "mask=visible, other=0)"),
    mutant("(keys % PAGE_SIZE).to(tl.int64)", "(keys % PAGE_SIZE)"),
    mutant("(job % num_kv_heads).to(tl.int64)", "(job % num_kv_heads)"),
    mutant("mask=in_item, other=0).to(tl.int64)", "mask=in_item, other=0)"),
    mutant("tl.load(item + 2).to(tl.int64)", "tl.load(item + 2)"),
    mutant("mask=row_is_real, other=0).to(tl.int64)", "mask=row_is_real, other=0)"),
    mutant("maximum[block], total[block], acc[block]\n", "maximum[0], total[block], acc[block]\n"),
]


def test_the_checks_notice_a_broken_kernel() -> None:
    chosen = MUTANTS[:: len(MUTANTS) // scaled(len(MUTANTS), 5)]
    assert survivors(chosen, checks) == []
