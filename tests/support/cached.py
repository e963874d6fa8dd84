"""What the server must report as cached, computed from the token ids of earlier requests alone."""

from __future__ import annotations

from collections.abc import Sequence


class Resident:
    """The sequences whose keys and values a server has written: prompts, and answers but for their last token."""

    def __init__(self) -> None:
        self._sequences: list[tuple[int, ...]] = []

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """A request that has ended."""
        self._sequences.append((*prompt, *answer[:-1]))

    def expected(self, prompt: Sequence[int]) -> int:
        """`min(L, prompt - 1)`, with L the longest prefix that the prompt shares with any of them."""
        longest = max((common_prefix(prompt, known) for known in self._sequences), default=0)
        return min(longest, len(prompt) - 1)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading ids are equal."""
    return next(
        (index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
        min(len(left), len(right)),
    )
