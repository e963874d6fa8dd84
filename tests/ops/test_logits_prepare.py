"""K7 in Triton's interpreter: against the formula, bit by bit, at the vocabulary's edges."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood_kernels import logits_prepare as logits_prepare_module
from sapwood_kernels import reference_logits
from sapwood_kernels.logit_edits import LogitEdits, RowEdits, build_logit_edits, place_logit_edits
from support.isolated import run_isolated
from support.mutants import Mutant, survivors
from support.ops import random_tensor
from support.scale import scaled

CPU = torch.device("cpu")


def random_edits(num_tokens: int, seed: int) -> RowEdits:
    """Some of everything: tokens of prompt and output, biased, banned, and all of these at once."""
    rng = np.random.default_rng(seed)
    seen, other = (rng.permutation(num_tokens)[: num_tokens // 2].astype(np.int32) for _ in range(2))
    return RowEdits(
        bias=tuple((int(id_), float(value)) for id_, value in zip(other, rng.normal(size=len(other)), strict=True)),
        banned_ids=tuple(rng.permutation(num_tokens)[:2].tolist()),
        token_ids=seen,
        token_counts=rng.integers(0, 4, len(seen), dtype=np.int32),
        repetition_penalty=float(rng.choice([1.0, 0.7, 1.3])),
        presence_penalty=float(rng.choice([0.0, 0.6, -1.1])),
        frequency_penalty=float(rng.choice([0.0, 0.3, -0.2])),
    )


def place(rows: list[RowEdits], num_tokens: int) -> LogitEdits:
    return place_logit_edits(build_logit_edits(rows, num_tokens), CPU)


def random_bitmask(num_rows: int, num_words: int) -> Tensor:
    """Random words, bit 31 as often as any other."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(-(2**31), 2**31, (num_rows, num_words), generator=generator).to(torch.int32)


def check_formula(module: ModuleType, num_tokens: int, size: int) -> None:
    """Rows with edits and a mask, with one of them, with none; a row of the mask used twice; NaN where logits are
    hidden, and between the rows."""
    rows = [random_edits(num_tokens, 1), RowEdits(), random_edits(num_tokens, 2), RowEdits()]
    edits = place(rows, num_tokens)
    bitmask = random_bitmask(3, -(-num_tokens // 32) + 1)
    bitmask_rows = torch.tensor([2, 2, -1, -1], dtype=torch.int32)
    memory = torch.full((4, size + 7), float("nan"))
    memory[:, :num_tokens] = random_tensor(4, num_tokens) * 5
    mine, theirs = memory[:, :size], memory[:, :size].clone()
    reference_logits.logits_prepare(theirs, num_tokens, edits, bitmask, bitmask_rows)
    module.logits_prepare(mine, num_tokens, edits, bitmask, bitmask_rows)
    assert torch.equal(mine, theirs)
    assert memory[:, size:].isnan().all()
    assert (mine[:, num_tokens:] == -torch.inf).all()


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (31, 32), (33, 64), (64, 64), (100, 128), (700, 701)])
def test_formula(num_tokens: int, size: int) -> None:
    check_formula(logits_prepare_module, num_tokens, size)


def test_order_of_the_steps_by_hand() -> None:
    row = RowEdits(
        bias=((0, 1.0), (1, -3.0), (3, 9.0)),
        banned_ids=(3,),
        token_ids=np.array([0, 1, 2], dtype=np.int32),
        token_counts=np.array([2, 1, 0], dtype=np.int32),
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
    )
    logits = torch.tensor([[3.0, 1.0, 8.0, 1.0, 5.0, 6.0]])
    logits_prepare_module.logits_prepare(logits, 5, place([row], 5))
    assert logits.tolist() == [[0.75, -4.75, 4.0, -torch.inf, 5.0, -torch.inf]]


def check_real_vocabulary(module: ModuleType) -> None:
    """151,669 tokens in 151,936 columns, rows further apart than that; one token allowed, in the last word's bit 31 and
    elsewhere."""
    memory = torch.zeros(2, 152064)
    logits = memory[:, :151936]
    bitmask = torch.zeros(1, 4740, dtype=torch.int32)
    bitmask[0, 17] = -(2**31)
    bitmask[0, 4739] = 1 << 20
    module.logits_prepare(logits, 151669, None, bitmask, torch.tensor([-1, 0], dtype=torch.int32))
    assert logits.isfinite().sum(1).tolist() == [151669, 2]
    assert logits[1].isfinite().nonzero()[:, 0].tolist() == [17 * 32 + 31, 4739 * 32 + 20]
    assert not memory[:, 151936:].any()


def test_the_tail_of_a_real_vocabulary_and_bit_31() -> None:
    check_real_vocabulary(logits_prepare_module)


def test_nothing_to_do_changes_nothing() -> None:
    logits = random_tensor(2, 50)
    wanted = logits.clone()
    logits_prepare_module.logits_prepare(logits, 50, place([RowEdits(), RowEdits()], 50))
    assert torch.equal(logits, wanted)
    logits_prepare_module.logits_prepare(torch.empty(0, 50), 40)


def check_tail(module: ModuleType) -> None:
    """Without a mask only the tail's blocks are launched."""
    logits = random_tensor(1, 5000)
    wanted = logits.clone()
    wanted[:, 3000:] = -torch.inf
    module.logits_prepare(logits, 3000)
    assert torch.equal(logits, wanted)


def test_the_tail_alone() -> None:
    check_tail(logits_prepare_module)


def check_rows(module: ModuleType) -> None:
    """A row alone has the bits that it has among 17."""
    rows = [random_edits(90, seed) for seed in range(17)]
    logits = random_tensor(17, 96) * 5
    alone = logits.clone()
    bitmask = random_bitmask(17, 3)
    module.logits_prepare(logits, 90, place(rows, 90), bitmask, torch.arange(16, -1, -1, dtype=torch.int32))
    for i, row in enumerate(rows):
        mask_row = torch.tensor([16 - i], dtype=torch.int32)
        module.logits_prepare(alone[i : i + 1], 90, place([row], 90), bitmask, mask_row)
    assert torch.equal(logits, alone)


def test_a_row_does_not_depend_on_the_others() -> None:
    check_rows(logits_prepare_module)


def check_far_rows() -> None:
    """A second row of logits, and of the bitmask, more than 2 ** 31 elements behind the first."""
    logits = torch.empty(2**31 + 192).as_strided((2, 64), (2**31 + 64, 1))
    logits[:] = random_tensor(2, 64)
    wanted = logits.clone()
    bitmask = torch.empty(2**31 + 34, dtype=torch.int32).as_strided((2, 2), (2**31 + 32, 1))
    bitmask[:] = random_bitmask(2, 2)
    edits = place([random_edits(60, 1), random_edits(60, 2)], 60)
    bitmask_rows = torch.tensor([0, 1], dtype=torch.int32)
    reference_logits.logits_prepare(wanted, 60, edits, bitmask, bitmask_rows)
    logits_prepare_module.logits_prepare(logits, 60, edits, bitmask, bitmask_rows)
    assert torch.equal(logits, wanted)


def test_offsets_past_2_31_elements() -> None:
    run_isolated(check_far_rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(64)}, "logits has shape"),
        ({"logits": torch.zeros(2, 64, dtype=torch.bfloat16)}, "logits is torch.bfloat16; accepted: torch.float32"),
        ({"logits": torch.zeros(64, 2).T}, "logits has strides"),
        ({"num_tokens": 0}, "num_tokens is 0; accepted: 1 to the logits' columns, 64"),
        ({"num_tokens": 65}, "num_tokens is 65"),
        ({"bitmask": None}, "bitmask and bitmask_rows are given one without the other"),
        ({"bitmask_rows": None}, "bitmask and bitmask_rows are given one without the other"),
        ({"bitmask": torch.zeros(1, 1, dtype=torch.int32)}, "bitmask has 1 columns; accepted: 2 or more"),
        ({"bitmask": torch.zeros(1, 2, dtype=torch.int64)}, "bitmask is torch.int64; accepted: torch.int32"),
        ({"bitmask": torch.zeros(2, 2, dtype=torch.int32).T}, "bitmask has strides"),
        ({"bitmask": torch.zeros(1, 2, dtype=torch.int32, device="meta")}, "bitmask is on meta"),
        ({"bitmask_rows": torch.zeros(3, dtype=torch.int32)}, "bitmask_rows has shape"),
        ({"bitmask_rows": torch.zeros(2)}, "bitmask_rows is torch.float32"),
        ({"bitmask_rows": torch.tensor([0, 1], dtype=torch.int32)}, "bitmask_rows holds 0 to 1; accepted: -1 to 0"),
        ({"bitmask_rows": torch.tensor([-2, 0], dtype=torch.int32)}, "bitmask_rows holds -2 to 0"),
        ({"edits": place([RowEdits()], 60)}, "first has shape"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments = {
        "logits": torch.zeros(2, 64),
        "num_tokens": 60,
        "edits": None,
        "bitmask": torch.zeros(1, 2, dtype=torch.int32),
        "bitmask_rows": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        logits_prepare_module.logits_prepare(**arguments | change)  # type: ignore[arg-type]


MUTANTS = [
    Mutant("sapwood_kernels.logits_prepare", old=old, new=new)
    for old, new in (
        ("hidden = token >= num_tokens", "hidden = token > num_tokens"),
        ("mask_row * bitmask_stride", "row * bitmask_stride"),
        ("& (token < size))", ")"),
        ("tl.where(x > 0, tl.div_rn", "tl.where(x < 0, tl.div_rn"),
        ("tl.where(count >= 0, repeated, x)", "tl.where(count > 0, repeated, x)"),
        ("tl.where(count > 0, x - presence, x)", "tl.where(count >= 0, x - presence, x)"),
        ("mask=has_word, other=-1", "mask=has_word, other=0"),
        ("inside = edit < tl.load(first + row + 1)", "inside = edit <= tl.load(first + row + 1)"),
        (
            "num_tokens // _MASK_BLOCK if bitmask is None else 0",
            "num_tokens // _MASK_BLOCK + 1 if bitmask is None else 0",
        ),
        ('tl.where(banned, float("-inf"), x)', "x"),
    )
]


def checks(module: ModuleType) -> None:
    check_formula(module, 33, 64)
    check_formula(module, 700, 701)
    check_rows(module)
    check_tail(module)


def test_the_checks_notice_a_broken_kernel() -> None:
    assert survivors(MUTANTS[: scaled(len(MUTANTS), 2)], checks) == []
