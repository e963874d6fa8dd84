"""The bitwise checks hold for the kernels, and notice kernels that break the rules."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from sapwood_bench.kernels.device import measured_device
from sapwood_bench.kernels.identity import (
    RULES,
    TINY,
    check_identity,
    grouped_decode,
    identity_cases,
    splits_of_a_prompt,
)
from sapwood_bench.kernels.op_checks import OP_CHECKS, check_op
from support.mutants import Mutant, survivors
from support.scale import scaled, suite_scale

CPU = torch.device("cpu")
(CASE,) = identity_cases(dry=True)
SAMPLE = random.Random(0).sample(sorted(RULES), scaled(len(RULES), 2))
FULL_ONLY = pytest.mark.skipif(suite_scale() < 1, reason="takes most of a minute: at full scale only")

MUTANTS_OF_PREFILL = [
    # Tiles that begin where a chunk does, not at multiples of their size.
    Mutant(
        "sapwood_kernels.paged_prefill",
        old="diagonal = tl.maximum(context + first + 1, 0) // BLOCK_N * BLOCK_N",
        new="diagonal = tl.maximum(context + first + 1, 0)",
    ),
]
MUTANTS_OF_DECODE = [
    # A row of a group that sees what the longest of them sees.
    Mutant(
        "sapwood_kernels.paged_decode",
        old="seen = keys[None, :] < row_keys[block][:, None]",
        new="seen = keys[None, :] < end_key + 0 * row_keys[block][:, None]",
    ),
]


def splits_hold(module: ModuleType) -> None:
    assert list(splits_of_a_prompt(CASE, CPU, TINY)) == []


def groups_hold(module: ModuleType) -> None:
    assert list(grouped_decode(CASE, CPU, TINY)) == []


@pytest.mark.parametrize("rule", SAMPLE)
def test_rules_hold_in_the_interpreter(rule: str) -> None:
    assert list(RULES[rule](CASE, CPU, TINY)) == []


@FULL_ONLY
def test_splits_notice_tiles_that_begin_with_a_chunk() -> None:
    assert survivors(MUTANTS_OF_PREFILL, splits_hold) == []


@FULL_ONLY
def test_groups_notice_a_row_that_sees_its_neighbours_keys() -> None:
    assert survivors(MUTANTS_OF_DECODE, groups_hold) == []


@FULL_ONLY
def test_every_rule_gives_a_check() -> None:
    checks = check_identity(CASE, CPU, TINY)
    assert [check.name for check in checks] == [f"{rule}: float16" for rule in RULES]


@pytest.mark.parametrize("name", OP_CHECKS)
def test_ops_hold_in_the_interpreter(name: str) -> None:
    assert check_op(name, measured_device(dry=True).torch_device, dry=True).problem == ""
