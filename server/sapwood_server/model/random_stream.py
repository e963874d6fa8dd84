"""Uniform numbers that depend on nothing but their key: no generator state that a batch could share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_BITS = 52
"""Of a uniform: with 52, `u * total < total` holds in doubles for every u, so a draw never runs past the last token."""


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One double in [0, 1) per `(seed, choice, position)`, a multiple of 2^-52; seeds are unsigned 64 bits.

    The key is folded part by part through the finaliser of splitmix64 (Steele, Lea and Flood, 2014).
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        state = _mix(np.array(seeds, dtype=np.uint64) + _GOLDEN)
        state = _mix((state ^ np.array(choices, dtype=np.uint64)) + _GOLDEN)
        state = _mix((state ^ np.array(positions, dtype=np.uint64)) + _GOLDEN)
    return (state >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return state ^ (state >> np.uint64(31))
