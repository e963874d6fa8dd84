"""The helper that shortens the suite."""

from __future__ import annotations

import pytest

from support.scale import scaled


@pytest.mark.parametrize(
    ("scale", "n", "minimum", "count"),
    [
        ("1", 2000, 1, 2000),
        ("0.05", 2000, 1, 100),
        ("0.05", 30, 1, 2),
        ("0.01", 10, 1, 1),
        ("0.05", 20, 5, 5),
        ("0.05", 3, 5, 3),
    ],
)
def test_counts_shrink_with_the_scale(
    monkeypatch: pytest.MonkeyPatch, scale: str, n: int, minimum: int, count: int
) -> None:
    monkeypatch.setenv("SAPWOOD_TEST_SCALE", scale)
    assert scaled(n, minimum) == count


@pytest.mark.parametrize("scale", ["0", "1.5", "nan", "fast", ""])
def test_a_bad_scale_is_quoted(monkeypatch: pytest.MonkeyPatch, scale: str) -> None:
    monkeypatch.setenv("SAPWOOD_TEST_SCALE", scale)
    with pytest.raises(ValueError, match=f"SAPWOOD_TEST_SCALE is '{scale}'"):
        scaled(10)
