"""Bytes to text: the same text however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_server.chat.detokenizer import Detokenizer
from support.scale import scaled

FAMILY = "👩🏽\u200d🚀 你好 ñ"


def decode(pieces: list[bytes]) -> list[str]:
    """The texts of the pieces, the last one marked as such."""
    detokenizer = Detokenizer()
    return [detokenizer.push(piece, last=index == len(pieces) - 1) for index, piece in enumerate(pieces)]


@settings(max_examples=scaled(2000, 100))
@given(st.lists(st.binary(max_size=6), min_size=1, max_size=12))
def test_any_bytes_cut_anywhere_give_the_text_of_the_whole(pieces: list[bytes]) -> None:
    assert "".join(decode(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@settings(max_examples=scaled(2000, 100))
@given(st.text(max_size=20), st.integers(1, 4))
def test_valid_text_never_shows_a_replacement_character(text: str, size: int) -> None:
    data = text.replace("\ufffd", "").encode()
    pieces = [data[start : start + size] for start in range(0, len(data), size)] or [b""]
    assert not any("\ufffd" in part for part in decode(pieces))


def test_half_a_character_is_held_back() -> None:
    pieces = [bytes([byte]) for byte in FAMILY.encode()]
    parts = decode(pieces)
    assert "".join(parts) == FAMILY
    assert parts[:4] == ["", "", "", "👩"]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
def test_bytes_left_over_at_the_end_become_one_replacement_character(whole: bool) -> None:
    data = b"ok" + "🚀".encode()[:3]
    pieces = [data] if whole else [bytes([byte]) for byte in data]
    assert "".join(decode(pieces)) == "ok\ufffd"
