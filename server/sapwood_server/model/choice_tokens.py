"""The tokens of one choice as lists that grow with it: what penalties on a device are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_FIRST_ROOM = 256
"""Of the lists; doubled when they are full."""


class ChoiceTokens:
    """Each distinct token of a choice's prompt and output, and how often the output has it."""

    def __init__(self, num_tokens: int) -> None:
        """Ids from `num_tokens` on, which a prompt may hold, are padding: never drawn, and not kept."""
        self._num_tokens = num_tokens
        self._ids: npt.NDArray[np.int32] = np.zeros(_FIRST_ROOM, dtype=np.int32)
        self._counts: npt.NDArray[np.int32] = np.zeros(_FIRST_ROOM, dtype=np.int32)
        self._index: dict[int, int] = {}
        self._num_seen = 0

    def update(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Both are the whole sequences; of the output only what is new is read. A shorter output starts over."""
        if not self._index or len(output_ids) < self._num_seen:
            self._start(prompt_ids)
        for id_ in output_ids[self._num_seen :]:
            if id_ < self._num_tokens:
                place = self._place_of(id_)  # first: it may move the counts to a larger buffer
                self._counts[place] += 1
        self._num_seen = len(output_ids)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """[n], distinct, in the order in which they came; a view, good until the next update."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """[n]: occurrences in the output; 0 for a token of the prompt alone. A view as well."""
        return self._counts[: len(self._index)]

    def _start(self, prompt_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        distinct = distinct[distinct < self._num_tokens]
        room = max(_FIRST_ROOM, 2 * len(distinct))
        self._ids = np.zeros(room, dtype=np.int32)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(room, dtype=np.int32)
        self._index = {id_: place for place, id_ in enumerate(distinct.tolist())}
        self._num_seen = 0

    def _place_of(self, id_: int) -> int:
        place = self._index.get(id_)
        if place is None:
            place = self._index[id_] = len(self._index)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = id_
        return place
