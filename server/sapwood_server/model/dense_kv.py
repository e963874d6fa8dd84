"""Dense copies of the keys and values of sequences that decode: what makes a CPU's decode fast at long contexts.

A decode step reads all keys and values of a sequence, and gathering them from pages first costs as much as attention
itself. So a sequence that decodes gets a copy that attention reads as it is, made once and extended by each token.
Pages stay the truth: every token is written there too, by the end of its step.

Copies are of the model's dtype. In fp32, torch's products of one query are faster as long as everything stays in the
CPU's cache; but at 3,000 tokens of the demo model, 138 MB of fp32 took 8.5 ms a step, and 69 MB of bf16 5.8 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from sapwood_server.model.config import ModelConfig
from sapwood_server.model.memory import kv_bytes_per_token

_ROOM = 256
"""Tokens that a new copy has room for beyond those it holds. When full, it moves to one a quarter larger."""


class DenseCopy:
    """The first `num_tokens` tokens of a sequence: keys and values, each `[num_layers, num_kv_heads, capacity,
    head_dim]`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, capacity: int) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        self._tokens = _empty((2, config.num_layers, config.num_kv_heads, capacity, config.head_dim), dtype)
        self.keys, self.values = self._tokens.unbind()

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._tokens.dtype

    def fill(self, layers: Iterable[Tensor], num_tokens: int) -> None:
        """Takes over the gathered pages of each layer, [2, num_kv_heads, >= num_tokens, head_dim].

        One layer after the other, while what was gathered is still in the CPU's cache.
        """
        for layer, tokens in enumerate(layers):
            self._tokens[:, layer, :, :num_tokens] = tokens[:, :, :num_tokens]
        self.num_tokens = num_tokens

    def take_over(self, other: DenseCopy) -> None:
        """Copies everything from a smaller copy."""
        count = other.num_tokens
        self._tokens[..., :count, :] = other._tokens[..., :count, :]
        self.num_tokens = count


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in numpy's memory, which asks for huge pages: touching it first takes a third of the time."""
    memory = np.empty(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


class DenseKV:
    """The dense copies of all sequences, within a budget. A sequence for which there is no room decodes from pages."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_bytes: int, max_tokens: int) -> None:
        self._config = config
        self._dtype = dtype
        self._bytes_per_token = kv_bytes_per_token(config, dtype)
        self._max_tokens = max_tokens
        self._free_tokens = max_bytes // self._bytes_per_token
        self._copies: dict[int, DenseCopy] = {}

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def num_bytes(self) -> int:
        """Memory that the copies hold now."""
        return self._bytes_per_token * sum(copy.capacity for copy in self._copies.values())

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Frees copies; sequences without one are no error."""
        for sequence_id in sequence_ids:
            copy = self._copies.pop(sequence_id, None)
            if copy is not None:
                self._free_tokens += copy.capacity

    def get(self, sequence_id: int, num_tokens: int) -> DenseCopy | None:
        """The sequence's copy if it holds exactly `num_tokens` tokens and has room for one more."""
        copy = self._copies.get(sequence_id)
        if copy is None:
            return None
        if copy.num_tokens != num_tokens:
            # Tokens went by that were not decoded (the sequence was handed a chunk): start again from the pages.
            self.release([sequence_id])
            return None
        if num_tokens < copy.capacity:
            return copy
        larger = self._allocate(num_tokens)
        self.release([sequence_id])
        if larger is not None:
            larger.take_over(copy)
            self._copies[sequence_id] = larger
        return larger

    def create(self, sequence_id: int, num_tokens: int) -> DenseCopy | None:
        """An empty copy with room for `num_tokens` and some more; None if the budget does not allow it."""
        copy = self._allocate(num_tokens)
        if copy is not None:
            self._copies[sequence_id] = copy
        return copy

    def _allocate(self, num_tokens: int) -> DenseCopy | None:
        capacity = min(num_tokens + max(_ROOM, num_tokens // 4), self._max_tokens)
        if capacity > self._free_tokens:
            return None
        self._free_tokens -= capacity
        return DenseCopy(self._config, self._dtype, capacity)
