"""The tokens of a choice, grown step by step, against a whole recount."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood_server.model.choice_tokens import ChoiceTokens
from support.scale import scaled

NUM_TOKENS = 20
TOKENS = st.lists(st.integers(0, NUM_TOKENS + 3), max_size=15)


def check(tokens: ChoiceTokens, prompt: list[int], output: list[int]) -> None:
    """Each distinct id once, with its count in the output; padding left out."""
    found = dict(zip(tokens.ids.tolist(), tokens.counts.tolist(), strict=True))
    counts = Counter(output)
    assert len(found) == len(tokens.ids)
    assert found == {id_: counts[id_] for id_ in {*prompt, *output} if id_ < NUM_TOKENS}


@given(prompt=TOKENS, outputs=st.lists(TOKENS, max_size=4), shortened=st.integers(0, 15))
@settings(max_examples=scaled(500, 50))
def test_what_is_new_is_added_and_a_shorter_output_starts_over(
    prompt: list[int], outputs: list[list[int]], shortened: int
) -> None:
    tokens = ChoiceTokens(NUM_TOKENS)
    output: list[int] = []
    tokens.update(prompt, output)
    check(tokens, prompt, output)
    for part in outputs:
        output += part
        tokens.update(prompt, output)
        check(tokens, prompt, output)
    output = [*output[:shortened], 3]
    tokens.update(prompt, output[:shortened])
    tokens.update(prompt, output)
    check(tokens, prompt, output)


def test_a_token_that_is_seen_again_keeps_its_place() -> None:
    tokens = ChoiceTokens(NUM_TOKENS)
    tokens.update([5, 3, 5], [7])
    tokens.update([5, 3, 5], [7, 3, 7, 9])
    assert tokens.ids.tolist() == [3, 5, 7, 9]
    assert tokens.counts.tolist() == [1, 0, 2, 1]


def test_more_tokens_than_there_was_room_for() -> None:
    tokens = ChoiceTokens(5000)
    tokens.update(range(200), [])
    output = [*range(150, 1200), 7, 7]
    tokens.update(range(200), output)
    assert tokens.ids.tolist() == list(range(1200))
    assert tokens.counts.tolist() == [2 if id_ == 7 else int(id_ >= 150) for id_ in range(1200)]
