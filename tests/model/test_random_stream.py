"""The uniforms behind every draw: a pure function of their key, and uniform."""

from __future__ import annotations

import numpy as np

from sapwood_server.model.random_stream import uniforms
from support.scale import scaled

MASK = 2**64 - 1


def splitmix_fold(seed: int, choice: int, position: int) -> float:
    """The same fold in Python's unbounded integers, as the comment in the module states it."""

    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        return state ^ (state >> 31)

    state = mix((seed + 0x9E3779B97F4A7C15) & MASK)
    for part in (choice, position):
        state = mix(((state ^ part) + 0x9E3779B97F4A7C15) & MASK)
    return (state >> 12) / 2**52


def test_equals_the_fold_in_plain_integers() -> None:
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**64 - 1, 127, 2**31 - 1), (123, 2, 4095)]
    found = uniforms([key[0] for key in keys], [key[1] for key in keys], [key[2] for key in keys])
    assert found.tolist() == [splitmix_fold(*key) for key in keys]
    assert len(set(found.tolist())) == len(keys)


def test_a_value_does_not_depend_on_its_neighbours() -> None:
    together = uniforms([5, 6, 7], [0, 1, 2], [10, 20, 30])
    alone = [
        uniforms([seed], [choice], [position])[0] for seed, choice, position in ((5, 0, 10), (6, 1, 20), (7, 2, 30))
    ]
    assert together.tolist() == alone


def test_uniform_along_each_part_of_the_key() -> None:
    """Chi-square over 64 bins, along seeds, choices and positions. The key is fixed, so the outcome is, too."""
    count, bins = scaled(64_000, 6_400), 64
    zero, ramp = [0] * count, list(range(count))
    for keys in ((ramp, zero, zero), (zero, ramp, zero), (zero, zero, ramp)):
        values = uniforms(*keys)
        assert values.min() >= 0.0
        assert values.max() < 1.0
        observed = np.histogram(values, bins=bins, range=(0.0, 1.0))[0]
        chi_square = float(((observed - count / bins) ** 2 / (count / bins)).sum())
        # 63 degrees of freedom: mean 63, deviation 11.2; 63 + 5 deviations.
        assert chi_square < 119


def test_neighbouring_keys_are_not_correlated() -> None:
    count = scaled(40_000, 4_000)
    along_positions = uniforms([9] * count, [0] * count, range(count))
    along_seeds = uniforms(range(count), [0] * count, [0] * count)
    for values in (along_positions, along_seeds):
        correlation = float(np.corrcoef(values[:-1], values[1:])[0, 1])
        assert abs(correlation) < 5 / count**0.5
    assert abs(float(np.corrcoef(along_positions, along_seeds)[0, 1])) < 5 / count**0.5
