"""The tokens of one choice as lists that grow with it: what penalties on a device are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class ChoiceTokens:
    """Each distinct token of a choice's prompt and output, and how often the output has it."""

    def __init__(self, num_tokens: int) -> None:
        """Ids from `num_tokens` on, which a prompt may hold, are padding: never drawn, and not kept."""
        self._num_tokens = num_tokens
        self._ids: list[int] = []
        self._counts: list[int] = []
        self._index: dict[int, int] = {}
        self._num_seen = 0

    def update(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Both are the whole sequences; of the output only what is new is read. A shorter output starts over."""
        if not self._ids or len(output_ids) < self._num_seen:
            distinct = [int(id_) for id_ in np.unique(np.asarray(prompt_ids, dtype=np.int64)) if id_ < self._num_tokens]
            self._ids = distinct
            self._counts = [0] * len(distinct)
            self._index = {id_: index for index, id_ in enumerate(distinct)}
            self._num_seen = 0
        for id_ in output_ids[self._num_seen :]:
            if id_ < self._num_tokens:
                self._add(id_)
        self._num_seen = len(output_ids)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """[n], distinct, in the order in which they came."""
        return np.array(self._ids, dtype=np.int32)

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """[n]: occurrences in the output; 0 for a token of the prompt alone."""
        return np.array(self._counts, dtype=np.int32)

    def _add(self, id_: int) -> None:
        index = self._index.get(id_)
        if index is None:
            self._index[id_] = len(self._ids)
            self._ids.append(id_)
            self._counts.append(1)
        else:
            self._counts[index] += 1
