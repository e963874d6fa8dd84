"""What top-k and top-p keep, exactly, against a stable sort."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sapwood_kernels import reference_logits
from sapwood_kernels import token_filters as token_filters_module
from sapwood_kernels.sample import SamplingTensors
from sapwood_kernels.token_filters import filter_threshold, order_key, weight_of
from support.mutants import Mutant, survivors
from support.scale import scaled


@triton.jit
def _threshold(
    values: tl.tensor,
    found: tl.tensor,
    num_values: tl.tensor,
    extremes: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Filters values that are the whole row, all finite: the threshold and its number of ties."""
    floor, peak = tl.load(extremes), tl.load(extremes + 1)
    index = tl.arange(0, 1024)
    x = tl.load(values + index, mask=index < num_values, other=float("-inf"))
    total = tl.sum(weight_of(x, peak, scale))
    threshold, num_ties = filter_threshold(
        values, num_values, floor, top_k, num_values, total, top_p, peak, scale, BLOCK
    )
    tl.store(found, threshold)
    tl.store(found + 1, num_ties)


@triton.jit
def _keys(values: tl.tensor, keys: tl.tensor, BLOCK: tl.constexpr) -> None:
    index = tl.arange(0, BLOCK)
    tl.store(keys + index, order_key(tl.load(values + index)))


def keys_of(values: Tensor) -> Tensor:
    """int32; a power of two of values."""
    keys = torch.empty(values.shape, dtype=torch.int32)
    _keys[(1,)](values, keys, BLOCK=values.numel())
    return keys


def kept(values: Tensor, top_k: int, top_p: float, temperature: float) -> Tensor:
    """bool [n], by the threshold and the ties at it."""
    found = torch.empty(2, dtype=torch.int32)
    _threshold[(1,)](
        values,
        found,
        values.numel(),
        torch.stack((values.min(), values.max())),
        top_k or values.numel(),
        top_p,
        1 / (np.log(2) * temperature),
        BLOCK=64,
    )
    padded = torch.full((1024,), -torch.inf)
    padded[: values.numel()] = values
    keys = keys_of(padded)[: values.numel()]
    threshold, num_ties = found.unbind()
    ties = keys == threshold
    return (keys > threshold) | (ties & (ties.cumsum(0) <= num_ties))


def wanted(values: Tensor, top_k: int, top_p: float, temperature: float) -> Tensor:
    one = torch.ones(1)
    filters = SamplingTensors(
        temperature=one * temperature, top_k=one.int() * top_k, top_p=one * top_p, min_p=one * 0,
        seed=one.long(), choice=one.int(), position=one.int(),
    )  # fmt: skip
    return torch.from_numpy(reference_logits.probabilities(values, filters, 0) > 0)


CASES: tuple[tuple[list[float], int, float], ...] = (
    ([1.0, 1.0, 1.0, 1.0, 1.0], 3, 1.0),
    ([0.0, 2.0, 1.0, 2.0, 1.0, 1.0], 4, 1.0),
    ([0.0, 2.0, 1.0, 2.0, 1.0, 1.0], 1, 1.0),
    ([0.0, -0.0, 0.0, -1.0], 2, 1.0),
    ([-0.0, 0.0, -0.0], 1, 1.0),
    ([3.0, 3.0, 3.0, 3.0], 0, 0.51),
    ([3.0, 3.0, 3.0, 3.0], 0, 0.49),
    ([3.0, 3.0, 3.0, 3.0], 3, 0.5),
    ([5.0, 1.0, 5.0, 1.0, 5.0], 4, 0.4),
    ([5.0, 4.0, 3.0, 2.0, 1.0], 0, 0.85),
    ([5.0, 4.0, 3.0, 2.0, 1.0], 0, 0.0),
    ([5.0, 4.0, 4.0, 4.0, 1.0], 4, 0.75),
    ([5.0, 4.0, 4.0, 4.0, 1.0], 0, 0.75),
    ([0.0, 1e-45, -1e-45, 3e-45], 2, 1.0),
    ([100.0, 0.0, 0.0, 0.0], 0, 0.999),
    ([7.0], 1, 0.5),
    ([float(i) for i in range(1, 17)], 10, 1.0),
    ([-1.0, -3.0, -2.0, -5.0], 2, 1.0),
    ([-1.0, -3.0, -2.0, -5.0], 0, 0.9),
    ([0.5, 0.5], 2, 1.0),
)


def check_cases(module: ModuleType) -> None:
    for values, top_k, top_p in CASES:
        found = kept(torch.tensor(values), top_k, top_p, 1.0)
        assert found.tolist() == wanted(torch.tensor(values), top_k, top_p, 1.0).tolist(), (values, top_k, top_p)


def test_ties_zeros_and_peaks() -> None:
    check_cases(token_filters_module)


@settings(max_examples=scaled(200, 12))
@given(
    levels=st.lists(st.integers(-40, 40), min_size=1, max_size=150),
    top_k=st.sampled_from((0, 1, 2, 7, 40, 1000)),
    top_p=st.sampled_from((1.0, 0.97, 0.731, 0.213)),
    temperature=st.sampled_from((0.3, 1.0, 7.0)),
)
def test_what_is_kept_is_a_prefix_of_the_stable_ranking(
    levels: list[int], top_k: int, top_p: float, temperature: float
) -> None:
    """Logits of 81 levels, so that ties abound; shares that no sum of weights comes near by accident."""
    values = torch.tensor([level / 8 for level in levels])
    top_k = min(top_k, len(levels))
    assert kept(values, top_k, top_p, temperature).tolist() == wanted(values, top_k, top_p, temperature).tolist()


def test_keys_have_the_order_of_numbers() -> None:
    keys = keys_of(torch.tensor([-torch.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, torch.inf]))
    assert (keys.diff() > 0).all()
    assert keys_of(torch.tensor([-0.0, 0.0])).tolist() == [0, 0]


MUTANTS = [
    Mutant("sapwood_kernels.token_filters", old=old, new=new)
    for old, new in (
        ("bits = tl.where(x == 0, 0.0, x).to", "bits = x.to"),
        ("bits ^ 0x7FFFFFFF, bits)", "bits, bits)"),
        ("tl.where(order_key(x) >= key,", "tl.where(order_key(x) > key,"),
        ("num_values, threshold + 1, peak, scale, True", "num_values, threshold, peak, scale, True"),
        ("low = tl.min(above)", "low = middle + 1"),
        ("tl.maximum(tl.max(below), low)", "low"),
        ("if found > threshold:", "if found < threshold:"),
        ("total = above + num_ties * weight_of(_value_of(threshold), peak, scale)", "total = above"),
        ("tl.where(num_above > 0, 0, 1)", "0"),
        ("found + 1, peak, scale, False", "found, peak, scale, False"),
        ("tl.ceil(missing", "tl.floor(missing"),
    )
]


def checks(module: ModuleType) -> None:
    check_cases(module)


def test_the_checks_notice_a_broken_filter() -> None:
    assert survivors(MUTANTS[: scaled(len(MUTANTS), 2)], checks) == []
