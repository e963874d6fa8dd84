"""Drawing against plain formulas, one row and one token at a time."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sapwood_server.model.draw import Filters, draw, draw_filtered
from support.scale import scaled


def plain_draw(masses: list[float], uniform: float) -> int:
    """The first index whose cumulative mass exceeds `uniform` times the whole."""
    target, cumulative = uniform * sum(masses), 0.0
    for index, mass in enumerate(masses):
        cumulative += mass
        if mass > 0 and cumulative > target:
            return index
    return max(index for index, mass in enumerate(masses) if mass > 0)


def plain_kept(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids that pass, best first: the definitions of the three filters, one after the other."""
    ids = sorted(range(len(probabilities)), key=lambda id_: (-probabilities[id_], id_))
    if top_k:
        ids = ids[:top_k]
    if top_p < 1.0:
        bound = top_p * (sum(probabilities[id_] for id_ in ids) if top_k else 1.0)
        kept: list[int] = []
        mass = 0.0
        for id_ in ids:
            if kept and not mass < bound:
                break
            kept.append(id_)
            mass += probabilities[id_]
        ids = kept
    return [id_ for id_ in ids if probabilities[id_] >= min_p * probabilities[ids[0]]]


def filters_of(rows: list[tuple[int, float, float]]) -> Filters:
    top_k, top_p, min_p = zip(*rows, strict=True)
    return Filters(
        torch.tensor(top_k, dtype=torch.int64),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
    )


def random_rows(seed: int, num_rows: int, size: int, spread: float) -> Tensor:
    """Probabilities [num_rows, size]; many ties, for logits are rounded to halves."""
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(num_rows, size, generator=generator) * spread * 2).round() / 2).softmax(-1)


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 255, 256, 257, 700]),
    uniform=st.floats(0, 1, exclude_max=True),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
)
@settings(max_examples=scaled(1000, 60))
def test_draw_inverts_the_cdf(seed: int, size: int, uniform: float, spread: float) -> None:
    row = random_rows(seed, 1, size, spread)
    drawn = int(draw(row, torch.tensor([uniform], dtype=torch.float64)))
    masses = row[0].double().tolist()
    expected = plain_draw(masses, uniform)
    if drawn != expected:  # only ever where the target lies on the step between the two, within fp64
        step = sum(masses[: max(drawn, expected)]) - uniform * sum(masses)
        assert abs(step) < 1e-12
        assert masses[drawn] > 0


def test_draw_never_takes_a_token_without_mass() -> None:
    row = torch.zeros(1, 600)
    row[0, 3], row[0, 599] = 0.25, 0.5
    row_of_late_mass = torch.zeros(1, 600)
    row_of_late_mass[0, 550] = 1.0
    assert int(draw(row_of_late_mass, torch.zeros(1, dtype=torch.float64))) == 550
    for uniform, expected in ((0.0, 3), (0.3333, 3), (0.3334, 599), (1 - 2**-52, 599)):
        assert int(draw(row, torch.tensor([uniform], dtype=torch.float64))) == expected


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 5, 300, 5000]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 20.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 256, 257, 4999, 100_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=scaled(1000, 60))
def test_filters_keep_what_their_definitions_keep(
    seed: int, size: int, spread: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> None:
    row = random_rows(seed, 1, size, spread)
    drawn = int(draw_filtered(row, filters_of([(top_k, top_p, min_p)]), torch.tensor([uniform], dtype=torch.float64)))
    masses = row[0].double().tolist()
    kept = plain_kept(masses, top_k, top_p, min_p)
    expected = kept[plain_draw([masses[id_] for id_ in kept], uniform)]
    # A bound that falls on a step within fp64's rounding may keep one token more or less; probabilities are coarse
    # enough here (rounded logits) that anything else is an error.
    if drawn != expected:
        near = [plain_kept(masses, top_k, top_p * shift, min_p) for shift in (1 - 1e-12, 1 + 1e-12)]
        assert drawn in {ids[plain_draw([masses[id_] for id_ in ids], uniform)] for ids in near}


def test_a_full_sweep_of_uniforms_reaches_every_kept_token_and_no_other() -> None:
    row = torch.tensor([[0.05, 0.3, 0.05, 0.4, 0.2]])
    uniform = torch.arange(1000, dtype=torch.float64) / 1000
    for filters, expected in (
        ((2, 1.0, 0.0), {3, 1}),
        ((0, 0.71, 0.0), {3, 1, 4}),
        ((0, 0.69, 0.0), {3, 1}),
        ((0, 1.0, 0.25), {3, 1, 4}),
        ((4, 1.0, 0.0), {3, 1, 4, 0}),
        ((3, 0.5, 0.0), {3, 1}),
        ((0, 1e-12, 0.0), {3}),
        ((0, 0.0, 0.0), {3}),
    ):
        drawn = draw_filtered(row.expand(1000, -1), filters_of([filters] * 1000), uniform)
        assert set(drawn.tolist()) == expected, filters


def test_a_nucleus_that_just_reaches_its_bound_is_complete() -> None:
    row = torch.tensor([[0.125, 0.5, 0.25, 0.125]])
    uniform = torch.arange(64, dtype=torch.float64) / 64
    for top_p, expected in ((0.5, {1}), (0.75, {1, 2}), (0.875, {0, 1, 2})):
        drawn = draw_filtered(row.expand(64, -1), filters_of([(0, top_p, 0.0)] * 64), uniform)
        assert set(drawn.tolist()) == expected


def test_of_equal_tokens_the_smaller_ids_are_kept() -> None:
    """Also where the short ranking ends amid equals: any of them may be in it, so it may not be trusted there."""
    row = torch.full((1, 5000), 1.0)
    row[0, 4000:4100] = 2.0
    row /= row.sum()
    uniform = torch.arange(500, dtype=torch.float64) / 500
    two_hundred = float(row[0, 4000:4100].sum() + 100 * row[0, 0])
    for filters in ((200, 1.0, 0.0), (0, two_hundred - 1e-6, 0.0), (300, 200 / 300 + 0.08, 0.0)):
        drawn = set(draw_filtered(row.expand(500, -1), filters_of([filters] * 500), uniform).tolist())
        assert drawn <= {*range(4000, 4100), *range(100)}, filters
        assert max(drawn - set(range(4000, 4100))) > 50


def test_a_row_draws_the_same_whatever_rows_are_beside_it() -> None:
    """Bit for bit, with rows that need a short ranking, a long one and a whole one."""
    probabilities = torch.cat([random_rows(1, 4, 9000, spread) for spread in (0.05, 1.0, 3.0, 30.0)])
    settings_ = [(0, 0.9, 0.0), (5000, 1.0, 0.0), (50, 0.95, 0.0), (0, 1.0, 0.1)] * 4
    uniform = torch.linspace(0, 0.999, 16, dtype=torch.float64)
    together = draw_filtered(probabilities, filters_of(settings_), uniform).tolist()
    alone = [
        int(draw_filtered(probabilities[row : row + 1], filters_of([settings_[row]]), uniform[row : row + 1]))
        for row in range(16)
    ]
    assert together == alone
    plain = draw(probabilities, uniform).tolist()
    assert plain == [int(draw(probabilities[row : row + 1], uniform[row : row + 1])) for row in range(16)]
