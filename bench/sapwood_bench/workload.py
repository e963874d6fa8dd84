"""Seeded prompts of exact token counts, made of plain English words."""

from __future__ import annotations

import random
from collections.abc import Iterator

from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.tokenizer import load_tokenizer

_TEXT = (
    "the river below our house carries wood and stone toward a quiet harbour where boats wait for morning light while "
    "people talk about weather bread letters from far cities and work that must be done before winter closes the road "
    "over high hills so nobody can travel until spring returns with rain green fields birds and news of another year"
)
_WORDS = tuple(_TEXT.split())

_FIRST_QUESTIONS = (
    "What is the capital of {}?",
    "Tell me one thing that people in {} are proud of.",
    "How would you spend a day in {}?",
    "Write one sentence about the weather in {}.",
    "Which food should I try in {}?",
)
_LATER_QUESTIONS = ("Why is that?", "Say it in other words.", "Give me one example.", "What should I read about it?")
_PLACE_NAMES = (
    "France Japan Kenya Peru Norway Canada Egypt India Brazil Greece Iceland Vietnam Portugal Morocco Chile Poland "
    "Ireland Nepal Cuba Ghana Austria Mexico Turkey Finland Laos Spain Samoa Jordan Italy Bolivia Sweden Mali Fiji "
    "Oman Serbia Taiwan Cyprus Malta Latvia Uganda"
)
_PLACES = tuple(_PLACE_NAMES.split())


class PromptMaker:
    """Makes token ids of running text. The same seed gives the same prompts in the same order."""

    def __init__(self, model: str, seed: int) -> None:
        self._tokenizer = load_tokenizer(resolve_model(model))
        self._random = random.Random(seed)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Exactly `num_tokens` ids. Two prompts of a maker share no more than their first few tokens, by chance."""
        words = [self._random.choice(_WORDS) for _ in range(num_tokens)]  # a word is at least one token
        ids = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids
        return tuple(ids[:num_tokens])


def conversations(count: int, turns: int, seed: int) -> Iterator[tuple[str, ...]]:
    """`count` different conversations: what the user says in each of the `turns` turns."""
    chooser = random.Random(seed)
    openings = [question.format(place) for question in _FIRST_QUESTIONS for place in _PLACES]
    if count > len(openings):
        raise ValueError(f"conversations is {count}; accepted: at most {len(openings)}, so that each differs")
    for opening in chooser.sample(openings, count):
        yield (opening, *(chooser.choice(_LATER_QUESTIONS) for _ in range(turns - 1)))
