"""The online softmax, which all attention shares: against one softmax over all keys, and where no key was seen."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels import fold as fold_module
from sapwood_kernels.fold import LOG2_E, finite, fold, log2_scores, online_softmax
from support.mutants import Mutant, survivors
from support.ops import random_tensor
from support.scale import scaled

ROWS, KEYS, DIMS = 4, 16, 8


@triton.jit
def _attend(
    scores: tl.tensor,
    values: tl.tensor,
    state: tl.tensor,
    num_tiles: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """Tiles of 16 keys taken in; state [ROWS, 2 + DIMS] gets maximum, total, acc."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for tile in tl.range(0, num_tiles):
        keys = tile * KEYS + tl.arange(0, KEYS)
        tile_scores = tl.load(scores + rows[:, None] * (num_tiles * KEYS) + keys[None, :])
        tile_values = tl.load(values + keys[:, None] * DIMS + dims[None, :])
        weights, maximum, total, acc = online_softmax(tile_scores, maximum, total, acc, scale)
        acc += tl.sum(weights[:, :, None] * tile_values[None, :, :], 1)
    tl.store(state + rows * (2 + DIMS), maximum)
    tl.store(state + rows * (2 + DIMS) + 1, total)
    tl.store(state + rows[:, None] * (2 + DIMS) + 2 + dims[None, :], acc)


@triton.jit
def _fold(state: tl.tensor, other: tl.tensor, out: tl.tensor, ROWS: tl.constexpr, DIMS: tl.constexpr) -> None:
    row, dims = tl.arange(0, ROWS) * (2 + DIMS), tl.arange(0, DIMS)
    where = row[:, None] + 2 + dims[None, :]
    maximum, total, acc = fold(
        tl.load(state + row), tl.load(state + row + 1), tl.load(state + where),
        tl.load(other + row), tl.load(other + row + 1), tl.load(other + where),
    )  # fmt: skip
    tl.store(out + row, maximum)
    tl.store(out + row + 1, total)
    tl.store(out + where, acc)


@triton.jit
def _scores(products: tl.tensor, out: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr) -> None:
    index = tl.arange(0, BLOCK)
    tl.store(out + index, log2_scores(tl.load(products + index), scale, SOFTCAP))


@triton.jit
def _finite(maximum: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    index = tl.arange(0, BLOCK)
    tl.store(out + index, finite(tl.load(maximum + index)))


def attend(scores: Tensor, values: Tensor, scale: float = 1.0) -> Tensor:
    state = torch.full((ROWS, 2 + DIMS), float("nan"))
    _attend[(1,)](scores, values, state, scores.shape[1] // KEYS, scale, ROWS=ROWS, KEYS=KEYS, DIMS=DIMS)
    return state


def folded(state: Tensor, other: Tensor) -> Tensor:
    out = torch.full_like(state, float("nan"))
    _fold[(1,)](state, other, out, ROWS=ROWS, DIMS=DIMS)
    return out


def wanted(scores: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention by one softmax in fp64; scores in units of log 2. [ROWS, DIMS]."""
    return torch.softmax(scores.double() * scale * np.log(2), dim=1) @ values.double()


def make_tiles(num_tiles: int) -> tuple[Tensor, Tensor]:
    """Scores over a wide range, the largest of a row in any tile; some masked."""
    scores = random_tensor(ROWS, num_tiles * KEYS) * 20
    scores[1, ::3] = -torch.inf
    return scores, random_tensor(num_tiles * KEYS, DIMS, seed=1)


def check_softmax(module: ModuleType, scale: float) -> None:
    scores, values = make_tiles(4)
    state = attend(scores, values, scale)
    assert torch.equal(state[:, 0], scores.amax(1) * scale)
    assert torch.allclose((state[:, 2:] / state[:, 1:2]).double(), wanted(scores, values, scale), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("scale", [1.0, 0.125 * LOG2_E])
def test_tiles_give_one_softmax(scale: float) -> None:
    check_softmax(fold_module, scale)


def check_masked_tile(module: ModuleType) -> None:
    """A tile masked whole changes no bit, and a row masked whole stays empty, without NaN."""
    scores, values = make_tiles(3)
    scores[:, KEYS : 2 * KEYS] = -torch.inf
    scores[3] = -torch.inf
    without = torch.cat((scores[:, :KEYS], scores[:, 2 * KEYS :]), dim=1)
    state = attend(scores, values)
    assert torch.equal(state, attend(without.contiguous(), torch.cat((values[:KEYS], values[2 * KEYS :]))))
    assert state[3].tolist() == [-torch.inf] + [0.0] * (1 + DIMS)


def test_a_masked_tile_changes_no_bit() -> None:
    check_masked_tile(fold_module)


def check_fold(module: ModuleType) -> None:
    """Two ranges' states folded are one softmax over both, whichever has the larger scores."""
    scores, values = make_tiles(4)
    scores[2, : 2 * KEYS] -= 200
    first = attend(scores[:, : 2 * KEYS].contiguous(), values[: 2 * KEYS])
    second = attend(scores[:, 2 * KEYS :].contiguous(), values[2 * KEYS :])
    for state in (folded(first, second), folded(second, first)):
        assert torch.equal(state[:, 0], scores.amax(1))
        assert torch.allclose(
            (state[:, 2:] / state[:, 1:2]).double(), wanted(scores, values, 1.0), rtol=2e-6, atol=2e-6
        )


def test_states_fold_to_one_softmax() -> None:
    check_fold(fold_module)


def check_empty(module: ModuleType) -> None:
    """An empty state is neutral to the bit, on either side; two of them stay empty."""
    state = attend(*make_tiles(2))
    empty = torch.zeros_like(state)
    empty[:, 0] = -torch.inf
    assert torch.equal(folded(state, empty), state)
    assert torch.equal(folded(empty, state), state)
    assert torch.equal(folded(empty, empty), empty)


def test_an_empty_state_is_neutral() -> None:
    check_empty(fold_module)


def scores_of(products: Tensor, scale: float, softcap: float) -> Tensor:
    out = torch.empty_like(products)
    _scores[(1,)](products, out, scale * LOG2_E, SOFTCAP=softcap, BLOCK=products.numel())
    return out


def check_softcap(module: ModuleType) -> None:
    """`cap * tanh(score / cap)` in units of log 2, also far past what exp can hold (88 * cap)."""
    products = torch.tensor([0.0, 1.0, -3.0, 40.0, 5e3, -5e3, 1e5, -1e5])
    with np.errstate(over="ignore"):
        found = scores_of(products, 0.5, 30.0)
    capped = 30.0 * torch.tanh(products.double() * 0.5 / 30.0) / np.log(2)
    assert torch.allclose(found.double(), capped, rtol=1e-5, atol=1e-5)
    assert torch.allclose(scores_of(products, 0.5, 0.0), products * (0.5 * LOG2_E))


def test_softcap_is_a_tanh_that_does_not_overflow_to_nan() -> None:
    check_softcap(fold_module)


def test_finite_replaces_minus_infinity_alone() -> None:
    values = torch.tensor([-torch.inf, -3e38, 0.0, 5.0])
    out = torch.empty_like(values)
    _finite[(1,)](values, out, BLOCK=4)
    assert out.tolist() == [0.0, float(values[1]), 0.0, 5.0]


MUTANTS = [
    Mutant("sapwood_kernels.fold", old=old, new=new)
    for old, new in (
        ("tl.maximum(maximum, tl.max(scores, 1) * scale)", "tl.max(scores, 1) * scale"),
        ("tl.maximum(maximum, tl.max(scores, 1) * scale)", "tl.maximum(maximum, tl.max(scores, 1))"),
        ("return weights, new_maximum, total, acc * alpha[:, None]", "return weights, new_maximum, total, acc"),
        ("tl.maximum(maximum, other_maximum)", "maximum"),
        ("beta = tl.exp2(other_maximum - base)", "beta = alpha"),
        ('tl.where(maximum == float("-inf"), 0.0, maximum)', "maximum"),
        ("other_acc * tl.expand_dims(beta, -1)", "other_acc"),
        ("(2 / softcap)", "(1 / softcap)"),
    )
]


def checks(module: ModuleType) -> None:
    check_softmax(module, 0.125 * LOG2_E)
    check_masked_tile(module)
    check_fold(module)
    check_empty(module)
    check_softcap(module)


def test_the_checks_notice_a_broken_softmax() -> None:
    assert survivors(MUTANTS[: scaled(len(MUTANTS), 3)], checks) == []
