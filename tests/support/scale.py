"""How much of a test's full count to run: `SAPWOOD_TEST_SCALE` in [0.01, 1], 0.05 if unset, 1 for `make test-full`."""

from __future__ import annotations

import math
import os

DEFAULT_SCALE = 0.05
_VARIABLE = "SAPWOOD_TEST_SCALE"


def suite_scale() -> float:
    """The share of every full count to run. Raises ValueError that quotes a bad value."""
    text = os.environ.get(_VARIABLE, str(DEFAULT_SCALE))
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0.01 <= scale <= 1.0:
        raise ValueError(f"{_VARIABLE} is {text!r}; accepted: a number from 0.01 to 1")
    return scale


def scaled(n: int, minimum: int = 1) -> int:
    """How many of `n` to run at the current scale: rounded up, never under `min(n, minimum)`, never over `n`."""
    return min(n, max(minimum, math.ceil(n * suite_scale())))
