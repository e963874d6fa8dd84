"""K8 in Triton's interpreter: against the formula, id by id, and its draws against the distribution they must have."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sapwood_kernels import reference_logits
from sapwood_kernels import sample as sample_module
from sapwood_kernels.sample import NOT_FINITE, NOTHING_LEFT, SamplingTensors
from support.mutants import Mutant, survivors
from support.ops import random_tensor
from support.scale import scaled

SETTINGS: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 1e-40},
    {"temperature": 3.0, "min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 5000},
    {"top_p": 0.0},
    {"top_p": 0.731},
    {"top_p": 0.95, "temperature": 60.0},
    {"top_k": 40, "top_p": 0.9137, "temperature": 0.6, "min_p": 0.01},
)
"""Not in here, on purpose: shares that a sum of weights comes near."""


def make_settings(num_rows: int, **values: float) -> SamplingTensors:
    """One setting for all rows; the stream differs by row, and the seed's upper bit is set in half of them."""
    row = torch.arange(num_rows)
    return SamplingTensors(
        temperature=torch.full((num_rows,), values.get("temperature", 1.0)),
        top_k=torch.full((num_rows,), int(values.get("top_k", 0)), dtype=torch.int32),
        top_p=torch.full((num_rows,), values.get("top_p", 1.0)),
        min_p=torch.full((num_rows,), values.get("min_p", 0.0)),
        seed=row * 0x9E3779B97F4A7C15,
        choice=(row % 3).int(),
        position=(row * 7).int(),
    )


def rows_of(settings: SamplingTensors, index: slice) -> SamplingTensors:
    return SamplingTensors(**{name: tensor[index] for name, tensor in vars(settings).items()})


def joined(parts: list[SamplingTensors]) -> SamplingTensors:
    return SamplingTensors(**{name: torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])})


def check_formula(module: ModuleType, size: int, each: int, values: tuple[dict[str, float], ...] = SETTINGS) -> None:
    """The same token as by sorting, for `each` rows of every setting."""
    settings = joined([make_settings(each, **row_values) for row_values in values])
    logits = random_tensor(len(settings.seed), size, seed=size) * 3
    assert module.sample(logits, settings).tolist() == reference_logits.sample(logits, settings).tolist()


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_formula(size: int) -> None:
    check_formula(sample_module, size, scaled(10))


def check_ties(module: ModuleType) -> None:
    """Equal logits in several tiles, more of them than may stay: the smallest ids do. Greedy and top_k = 1 take the
    first of the largest, and so does any share of mass that one token has."""
    logits = torch.full((8, 9000), -20.0)
    logits[:, [4095, 4096, 8191, 8999]] = 2.0
    logits[:, 7] = 1.0
    parts: list[dict[str, float]] = [
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 1, "temperature": 30.0},
        {"top_p": 0.0},
    ]
    first = module.sample(logits[:4], joined([make_settings(1, **part) for part in parts]))
    assert first.tolist() == [4095] * 4
    settings = joined([make_settings(4, top_k=3), make_settings(4, top_k=5, top_p=0.6)])
    assert module.sample(logits, settings).tolist() == reference_logits.sample(logits, settings).tolist()
    small = module.sample(torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, 2.0]).repeat(16, 1), make_settings(16, top_k=2))
    assert set(small.tolist()) == {1, 3}


def test_ties_are_kept_from_the_smallest_id() -> None:
    check_ties(sample_module)


def check_wide(module: ModuleType) -> None:
    """More logits near the largest than there is room for candidates: filters run over the whole row."""
    logits = random_tensor(2, 9001, seed=3) * 0.1
    logits[:, ::3] = 0.5
    settings = joined([make_settings(1, top_k=2500, top_p=0.613), make_settings(1, top_p=0.413)])
    assert module.sample(logits, settings).tolist() == reference_logits.sample(logits, settings).tolist()
    # Few near the largest, but their mass is not enough.
    logits = torch.full((4, 2**17), -11.2)
    logits[:, 17] = 0.0
    settings = make_settings(4, top_p=0.999)
    assert module.sample(logits, settings).tolist() == reference_logits.sample(logits, settings).tolist()


def test_filters_over_more_than_the_candidates() -> None:
    check_wide(sample_module)


def check_failures(module: ModuleType) -> None:
    """Rows that give no token, greedy or not, beside rows that do; one-hot rows and one token left by a mask."""
    infinity, nan = float("inf"), float("nan")
    rows = [
        [nan, 1.0, 2.0],
        [1.0, infinity, 2.0],
        [infinity, nan, -infinity],
        [-infinity, -infinity, -infinity],
        [-infinity, nan, -infinity],
        [-infinity, 5.0, -infinity],
        [-3e38, -3e38, 3e38],
        [0.0, 0.0, 1e4],
    ]
    wanted = [NOT_FINITE] * 3 + [NOTHING_LEFT, NOT_FINITE, 1, 2, 2]
    settings: tuple[dict[str, float], ...] = ({"temperature": 0.0}, {"top_k": 2, "top_p": 0.9})
    for values in settings:
        with np.errstate(over="ignore"):  # -3e38 - 3e38
            assert module.sample(torch.tensor(rows), make_settings(8, **values)).tolist() == wanted


def test_rows_without_a_token_to_draw() -> None:
    check_failures(sample_module)


def check_rows(module: ModuleType) -> None:
    """A row alone draws what it draws among 17, whatever lies behind its columns or between the rows."""
    settings = joined([make_settings(14), make_settings(3, top_k=50, top_p=0.95, min_p=0.001)])
    memory = torch.full((17, 200), float("nan"))
    memory[:, :150] = random_tensor(17, 150) * 2
    memory[:, 150:180] = -torch.inf
    drawn = module.sample(memory[:, :180], settings)
    alone = [module.sample(memory[i : i + 1, :150].clone(), rows_of(settings, slice(i, i + 1))) for i in range(17)]
    assert drawn.tolist() == torch.cat(alone).tolist()


def test_a_row_does_not_depend_on_the_others() -> None:
    check_rows(sample_module)


def test_the_stream_is_the_seeds_choices_and_positions() -> None:
    """Each part of the key alone changes what is drawn from 4,000 equals; the same key draws the same."""
    keys = torch.tensor([[5, 0, 0], [5, 0, 0], [6, 0, 0], [5 + 2**32, 0, 0], [5 - 2**63, 0, 0], [5, 1, 0], [5, 0, 1]])
    one = make_settings(7)
    settings = SamplingTensors(
        **vars(one) | {"seed": keys[:, 0].clone(), "choice": keys[:, 1].int(), "position": keys[:, 2].int()}
    )
    drawn = sample_module.sample(torch.zeros(7, 4000), settings).tolist()
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 6


def chi_squared(counts: Tensor, chances: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    wanted = chances * int(counts.sum())
    kept = wanted > 0
    assert not counts[~torch.from_numpy(kept)].any()
    return float((((counts.numpy() - wanted)[kept]) ** 2 / wanted[kept]).sum())


LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 1.0, -0.4, 0.9])
DISTRIBUTIONS = (
    ({"temperature": 1.3}, 24.32),
    ({"temperature": 1.5, "min_p": 0.3}, 18.47),
    ({"top_k": 5}, 18.47),
    ({"top_p": 0.8, "temperature": 1.5, "min_p": 0.1}, 18.47),
)
"""Settings, and the 99.9th percentile of chi-squared for the tokens they keep: 7 and at most 4 degrees of freedom."""


@pytest.mark.parametrize(("values", "bound"), DISTRIBUTIONS[:2])
def test_draws_are_distributed_as_the_settings_say(values: dict[str, float], bound: float) -> None:
    """Frequencies of fixed seeds, one row each."""
    num_rows = scaled(1000, 60)
    settings = make_settings(num_rows, **values)
    drawn = sample_module.sample(LOGITS.repeat(num_rows, 1), settings)
    chances = reference_logits.probabilities(LOGITS, settings, 0)
    assert chi_squared(torch.bincount(drawn, minlength=8), chances) < bound


@pytest.mark.parametrize(("values", "bound"), DISTRIBUTIONS)
def test_the_formula_draws_thousands_alike(values: dict[str, float], bound: float) -> None:
    """The formula's stream is the kernel's, id by id; the interpreter has no time for so many draws with filters."""
    num_rows = scaled(10000, 1000)
    settings = make_settings(num_rows, **values)
    drawn = reference_logits.sample(LOGITS.expand(num_rows, 8), settings)
    chances = reference_logits.probabilities(LOGITS, settings, 0)
    assert chi_squared(torch.bincount(drawn, minlength=8), chances) < bound


def test_no_rows() -> None:
    assert sample_module.sample(torch.empty(0, 5), make_settings(0)).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": torch.tensor([1.0, -0.5])}, "temperature holds -0.5; accepted: 0 or more"),
        ({"temperature": torch.tensor([1.0, float("nan")])}, "temperature holds nan"),
        ({"temperature": torch.ones(2, dtype=torch.float64)}, "temperature is torch.float64; accepted: torch.float32"),
        ({"top_k": torch.tensor([-1, 5], dtype=torch.int32)}, "top_k holds -1; accepted: 0 or more"),
        ({"top_k": torch.tensor([1, 5])}, "top_k is torch.int64"),
        ({"top_p": torch.tensor([0.5, 1.5])}, "top_p holds 1.5; accepted: 0 to 1"),
        ({"min_p": torch.tensor([-0.1, 0.5])}, "min_p holds -0.1"),
        ({"min_p": torch.zeros(3)}, "min_p has shape"),
        ({"seed": torch.zeros(2, dtype=torch.int32)}, "seed is torch.int32; accepted: torch.int64"),
        ({"choice": torch.zeros(4, dtype=torch.int32)[::2]}, "choice has strides"),
        ({"position": torch.zeros(2, dtype=torch.int32, device="meta")}, "position is on meta"),
    ],
)
def test_bad_settings_are_named(change: dict[str, Tensor], message: str) -> None:
    settings = SamplingTensors(**vars(make_settings(2)) | change)
    with pytest.raises(ValueError, match=message):
        sample_module.sample(torch.zeros(2, 8), settings)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(8), "logits has shape"),
        (torch.zeros(2, 0), "logits has shape .* accepted: at least one column"),
        (torch.zeros(2, 8, dtype=torch.float16), "logits is torch.float16"),
        (torch.zeros(8, 2).T, "logits has strides"),
    ],
)
def test_bad_logits_are_named(logits: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_module.sample(logits, make_settings(2))


MUTANTS = [
    Mutant("sapwood_kernels.sample", old=old, new=new)
    for old, new in (
        ("has_nan | (peak ==", "(peak =="),
        ("        at = tl.where(x > largest, token, at)\n", "        at = tl.where(x >= largest, token, at)\n"),
        ("index = num_near + tl.cumsum", "index = tl.cumsum"),
        ("num_near += found", "num_near += 1"),
        ("rank < num_ties", "rank <= num_ties"),
        ("        ties_before += ties\n", ""),
        (">= min_p)", "> min_p)"),
        ("- tl.log2(_exponentials", "+ tl.log2(_exponentials"),
        ("tl.interleave(r0, r2), tl.interleave(r1, r3)", "tl.interleave(r0, r1), tl.interleave(r2, r3)"),
        ("counter = start // 4 +", "counter = start +"),
        ("zero + position, zero + choice", "zero + choice, zero + position"),
        ("enough | (num_near == num_finite)", "True"),
    )
]


def checks(module: ModuleType) -> None:
    check_failures(module)
    check_ties(module)
    check_formula(module, 4200, 1, ({"min_p": 1.0}, {"top_k": 3}, {"top_p": 0.731}, SETTINGS[-1]))
    check_wide(module)


def test_the_checks_notice_a_broken_kernel() -> None:
    assert survivors(MUTANTS[: scaled(len(MUTANTS), 2)], checks) == []
