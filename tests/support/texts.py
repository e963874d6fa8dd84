"""The fixed text that ships with the tests, as the demo model's tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.tokenizer import load_tokenizer
from sapwood_server.values.demo import DEMO_MODEL

ESSAYS = Path(__file__).parents[1] / "data" / "essays.txt"
"""Some 4,100 tokens of English prose, written for these tests."""


@cache
def demo_tokenizer() -> Tokenizer:
    """The demo model's tokenizer."""
    return load_tokenizer(resolve_model(DEMO_MODEL))


def demo_ids(text: str) -> list[int]:
    """The text as token ids, control tokens spelled out in it included."""
    ids: list[int] = demo_tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def essay_ids() -> list[int]:
    """The whole text."""
    return demo_ids(ESSAYS.read_text(encoding="utf-8"))
