"""Prompts as token ids."""

from __future__ import annotations

import threading
import time

import pytest

from sapwood_server.chat.messages import Message
from sapwood_server.chat.prompt import PromptEncoder
from sapwood_server.chat.template import ChatTemplate
from sapwood_server.errors import BadRequestError
from support.api_service import BOS_ID, CHAT_TEMPLATE, END_ID, START_ID, byte_tokenizer


def encoder(*, template: bool = True, bos_id: int | None = None) -> PromptEncoder:
    """An encoder over bytes."""
    return PromptEncoder(
        tokenizer=byte_tokenizer(),
        template=ChatTemplate({"default": CHAT_TEMPLATE}, {}) if template else None,
        bos_id=bos_id,
        end_of_turn_id=END_ID,
    )


def test_a_chats_special_tokens_are_those_of_its_template() -> None:
    ids = encoder(bos_id=BOS_ID).encode_chat([Message(role="user", content="hé")], (), {})
    assert ids == (START_ID, *b"user\nh\xc3\xa9", END_ID, *b"\n", START_ID, *b"assistant\n")


def test_a_model_without_a_template_has_no_chat() -> None:
    with pytest.raises(BadRequestError, match="no chat template"):
        encoder(template=False).encode_chat([Message(role="user", content="x")], (), {})


def test_raw_text_starts_with_bos_exactly_once_where_the_model_wants_it() -> None:
    assert encoder().encode_text("ab") == (*b"ab",)
    assert encoder(bos_id=BOS_ID).encode_text("ab") == (BOS_ID, *b"ab")
    assert encoder(bos_id=BOS_ID).encode_text("<|bos|>ab") == (BOS_ID, *b"ab")


def test_an_answer_ends_with_the_end_of_turn_token() -> None:
    assert encoder(bos_id=BOS_ID).encode_answer("ab") == (*b"ab", END_ID)


def test_other_threads_run_while_a_long_prompt_is_encoded() -> None:
    """Streams are written by another thread, which a long prompt must not stop. Turns of that thread are counted."""
    turns = 0
    during: list[int] = []

    def encode() -> None:
        start = turns
        encoder().encode_text("a" * 500_000)
        during.append(turns - start)

    encoding = threading.Thread(target=encode)
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert during[0] > 4  # 0 to 2 if the encoding thread gives up Python's lock only before and after its work
