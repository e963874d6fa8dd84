"""Events to deltas."""

from __future__ import annotations

import pytest

from sapwood_server.chat.stream import ChoiceStream
from sapwood_server.values.events import FinishReason, TokenEvent


def event(data: bytes, finish: FinishReason | None = None, choice: int = 0) -> TokenEvent:
    """An event of one token."""
    return TokenEvent(request_id="r", choice=choice, token_ids=(7,), data=data, finish_reason=finish)


def test_text_ids_and_the_end_pass_through() -> None:
    stream = ChoiceStream()
    first, last = stream.push(event(b"a")), stream.push(event(b"b", FinishReason.LENGTH))
    assert (first.text, first.token_ids, first.finish_reason) == ("a", (7,), None)
    assert (last.text, last.finish_reason) == ("b", FinishReason.LENGTH)


def test_the_last_delta_flushes_what_was_held_back() -> None:
    stream = ChoiceStream()
    assert stream.push(event(b"\xf0\x9f")).text == ""
    assert stream.push(event(b"", FinishReason.STOP)).text == "\ufffd"


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_a_choice_that_was_broken_off_has_no_finish_reason(reason: FinishReason) -> None:
    assert ChoiceStream().push(event(b"a", reason)).finish_reason is None


def test_choices_are_numbered_from_the_first_of_their_request() -> None:
    assert ChoiceStream().push(event(b"a", choice=1), first_choice=4).choice == 5
