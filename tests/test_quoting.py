"""Whatever a message quotes is short, and costs little to quote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sapwood_server.quoting import LINE_CHARACTERS, QUOTE_CHARACTERS, quote, quote_json, reason_of, shorten

LONGEST = QUOTE_CHARACTERS + len("...")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


class Unending(list[int]):
    """Fails a test that looks at more of it than can be shown."""

    def __iter__(self) -> Any:
        yield from range(10 * QUOTE_CHARACTERS)
        raise AssertionError("all of it was read")


@pytest.mark.parametrize(
    ("value", "python", "as_json"),
    [
        ("it's", '"it\'s"', '"it\'s"'),
        ("x" * 78, repr("x" * 78), '"' + "x" * 78 + '"'),
        (None, "None", "null"),
        (True, "True", "true"),
        (-0.5, "-0.5", "-0.5"),
        ([1, "x", {"y": []}], "[1, 'x', {'y': []}]", '[1, "x", {"y": []}]'),
        ("line\nbreak", r"'line\nbreak'", r'"line\nbreak"'),
        ("é", "'é'", '"é"'),
    ],
)
def test_a_short_value_is_shown_whole(value: Any, python: str, as_json: str) -> None:
    assert (quote(value), quote_json(value)) == (python, as_json)


@pytest.mark.parametrize("show", [quote, quote_json])
@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**6,
        ["x" * 50, "y" * 50],
        {"k" * 200: "v" * 200},
        {str(index): index for index in range(1000)},
        nested(100_000),
        [nested(50)] * 50,
        10**3000,
        10**5000,
        [10**5000],
        Unending([1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_long_one_by_its_beginning(show: Callable[[Any], str], value: Any) -> None:
    assert len(show(value)) <= LONGEST


def test_the_beginning_is_the_values_own() -> None:
    assert quote("abc" * 100) == shorten(repr("abc" * 100))
    assert quote_json("abc" * 100).startswith('"abcabc')
    assert quote_json("abc" * 100).endswith("...")


def test_a_reason_is_one_bounded_line() -> None:
    assert reason_of(ValueError("two\n  lines")) == "two lines"
    assert len(reason_of(ValueError("x" * 10_000))) == LINE_CHARACTERS + len("...")
