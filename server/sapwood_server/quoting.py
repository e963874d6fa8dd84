"""How messages show values that come from outside, a client's or a file's: those may be of any length."""

from __future__ import annotations

import json
import reprlib

QUOTE_CHARACTERS = 80
"""Enough to recognise a value; an error is a line to be read."""
LINE_CHARACTERS = 400
"""For what is of use only whole, such as a path, and for what another library or a template says of a failure: that may
quote values in its turn."""

_NO_TEXT = "a number of thousands of digits"
"""Python makes no text of one: that takes the square of its length."""
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def shorten(text: str, limit: int = QUOTE_CHARACTERS) -> str:
    """`text`, or its first `limit` characters and `...`."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def quote(value: object, limit: int = QUOTE_CHARACTERS) -> str:
    """Python's form of a value, short."""
    if isinstance(value, str | bytes):
        return shorten(repr(value[: limit + 1]), limit)
    try:
        return shorten(_bounded_repr().repr(value), limit)
    except ValueError:
        return _NO_TEXT


def quote_json(value: object) -> str:
    """A JSON value as JSON, short. No more of it is written than is shown, so that its depth and size cost nothing."""
    text = ""
    try:
        for piece in _ENCODER.iterencode(value):
            text += piece
            if len(text) > QUOTE_CHARACTERS:
                break
    except ValueError:
        return _NO_TEXT
    return shorten(text)


def reason_of(error: BaseException) -> str:
    """An exception's own words on one line, short."""
    return shorten(" ".join(str(error).split()), LINE_CHARACTERS)


def _bounded_repr() -> reprlib.Repr:
    """Looks at so many items and characters of a value as could be shown."""
    bounded = reprlib.Repr()
    bounded.maxlist = bounded.maxtuple = bounded.maxdict = bounded.maxset = QUOTE_CHARACTERS
    bounded.maxstring = bounded.maxlong = bounded.maxother = QUOTE_CHARACTERS
    return bounded
