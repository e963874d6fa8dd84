from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_server.formats.stop import StopMatcher, StopStrings
from support.digest_kv import first_stop
from support.scale import scaled

_STOPS = st.lists(st.text("ab", min_size=1, max_size=5).map(str.encode), min_size=1, max_size=4)
_CHUNKS = st.lists(st.text("ab", max_size=4).map(str.encode), max_size=12)


def _may_begin_a_stop(text: bytes, stops: list[bytes]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    return max(k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k]))


@given(stops=_STOPS, chunks=_CHUNKS)
@settings(max_examples=scaled(3000, 100))
def test_agrees_with_a_search_of_the_whole_text_after_every_chunk(stops: list[bytes], chunks: list[bytes]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    text, released = b"", b""
    for chunk in chunks:
        text += chunk
        released += matcher.feed(chunk)
        cut = first_stop(text, stops)
        assert matcher.matched == (cut is not None)
        if cut is not None:
            assert released == text[:cut]
            assert matcher.flush() == b""
            return
        # Not a byte too few is held back, nor one too many.
        assert released == text[: len(text) - _may_begin_a_stop(text, stops)]
    assert released + matcher.flush() == text
    assert matcher.flush() == b""


@given(stops=_STOPS, text=st.text("ab", max_size=12).map(str.encode), data=st.data())
@settings(max_examples=scaled(1000, 50))
def test_the_cut_of_the_stream_does_not_matter(stops: list[bytes], text: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    results = []
    for stream in ([text], pieces):
        matcher = StopMatcher(StopStrings(stops))
        released = b""
        for piece in stream:
            released += matcher.feed(piece)
            if matcher.matched:
                break
        results.append((released + matcher.flush(), matcher.matched))
    assert results[0] == results[1]


def test_a_stop_string_may_split_a_character() -> None:
    stop = "é".encode()
    matcher = StopMatcher(StopStrings([stop]))
    assert matcher.feed(b"caf" + stop[:1]) == b"caf"
    assert matcher.feed(stop[1:] + b" noir") == b""
    assert matcher.matched


def test_falls_back_inside_a_partial_match() -> None:
    matcher = StopMatcher(StopStrings([b"aab"]))
    assert matcher.feed(b"aaa") == b"a"  # "aa" may still become "aab"
    assert matcher.feed(b"b") == b""
    assert matcher.matched


def test_of_stops_that_end_together_the_longest_wins() -> None:
    matcher = StopMatcher(StopStrings([b"b", b"aab"]))
    assert matcher.feed(b"xaab") == b"x"


def test_choices_share_the_strings_and_nothing_else() -> None:
    strings = StopStrings([b"aab"])
    first, second = StopMatcher(strings), StopMatcher(strings)
    assert [first.feed(b"xa"), second.feed(b"a"), first.feed(b"ab"), second.feed(b"b")] == [b"x", b"", b"", b"ab"]
    assert (first.matched, second.matched) == (True, False)


def test_refuses_an_empty_stop_string_and_bytes_after_the_end() -> None:
    with pytest.raises(ValueError, match="accepted: non-empty"):
        StopStrings([b"a", b""])
    matcher = StopMatcher(StopStrings([b"a"]))
    matcher.feed(b"a")
    with pytest.raises(ValueError, match="ended at a stop string"):
        matcher.feed(b"b")
