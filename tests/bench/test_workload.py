"""Prompts of exact lengths, and conversations that differ."""

from __future__ import annotations

import pytest

from sapwood_bench.workload import PromptMaker, conversations
from sapwood_server.values.demo import DEMO_MODEL


def test_prompts_have_exact_lengths_and_little_in_common() -> None:
    maker = PromptMaker(DEMO_MODEL, seed=1)
    first, second = maker.prompt(300), maker.prompt(300)
    assert len(first) == len(second) == 300
    assert first[:5] != second[:5]


def test_a_seed_fixes_the_prompts() -> None:
    assert PromptMaker(DEMO_MODEL, seed=2).prompt(50) == PromptMaker(DEMO_MODEL, seed=2).prompt(50)
    assert PromptMaker(DEMO_MODEL, seed=2).prompt(50) != PromptMaker(DEMO_MODEL, seed=3).prompt(50)


def test_conversations_differ_from_their_first_words_on() -> None:
    held = list(conversations(200, 3, seed=1))
    assert {len(questions) for questions in held} == {3}
    assert len({questions[0] for questions in held}) == 200


def test_too_many_conversations_are_refused() -> None:
    with pytest.raises(ValueError, match="conversations is 201"):
        list(conversations(201, 3, seed=1))
