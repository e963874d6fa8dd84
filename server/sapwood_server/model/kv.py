"""The pages that hold keys and values on the CPU, and the block tables that say whose they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from sapwood_server.model.config import ModelConfig
from sapwood_server.values.plan import PageCopy


class PagedKV:
    """Keys and values of every layer, in pages of `page_size` tokens.

    One tensor `[num_layers, 2, num_kv_heads, num_pages, page_size, head_dim]`: a head's tokens lie side by side within
    a page, so a gather copies runs of `page_size * head_dim` elements and its result is what attention reads. Page 0
    is reserved: zero, never written.
    """

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        shape = (config.num_layers, 2, config.num_kv_heads, num_pages, page_size, config.head_dim)
        self.pages = _untouched_zeros(shape, dtype)
        self.num_layers = config.num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self._layers: tuple[Tensor, ...] = tuple(layer.permute(2, 0, 1, 3, 4) for layer in self.pages)
        # [num_layers * 2 * num_kv_heads, num_slots, head_dim]
        self._slots = self.pages.flatten(3, 4).flatten(0, 2)

    def layer(self, index: int) -> Tensor:
        """One layer as the ops take it, `[num_pages, 2, num_kv_heads, page_size, head_dim]`, a view."""
        return self._layers[index]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies the first slots of pages to other pages, in every layer. Sources are read before any is written."""
        if not copies:
            return
        for copy in copies:
            self.check_page(copy.source)
            self.check_page(copy.target)
            if not 0 < copy.num_slots <= self.page_size:
                raise ValueError(f"num_slots is {copy.num_slots}; accepted: 1 to {self.page_size}")
        sources = [self.pages[:, :, :, copy.source, : copy.num_slots].clone() for copy in copies]
        for copy, source in zip(copies, sources, strict=True):
            self.pages[:, :, :, copy.target, : copy.num_slots] = source

    def gather(self, layer: int, pages: Tensor) -> Tensor:
        """The tokens of `pages` int64 [n] in one layer: [2, num_kv_heads, n * page_size, head_dim]."""
        return self.pages[layer].index_select(2, pages).flatten(2, 3)

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Writes tokens of every layer. slots int64 [n]; tokens [num_layers, 2, num_kv_heads, n, head_dim]."""
        self._slots.index_copy_(1, slots, tokens.flatten(0, 2).to(self._slots.dtype))

    def check_page(self, page: int) -> None:
        """Raises ValueError for a page that does not exist, and for page 0."""
        if not 0 < page < self.num_pages:
            raise ValueError(f"page is {page}; accepted: 1 to {self.num_pages - 1}")


def _untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros as the operating system gives them: memory that is resident only once it is written. (`torch.zeros` writes
    them, and 4 GiB of them take seconds.)"""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(*shape)


class BlockTables:
    """The pages of each sequence, in order, kept from step to step."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tables: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forgets sequences; those never seen (their first step failed) are no error."""
        for sequence_id in sequence_ids:
            self._tables.pop(sequence_id, None)

    def extend(self, sequence_id: int, new_pages: Sequence[int], num_tokens: int) -> list[int]:
        """The sequence's table with `new_pages` appended. ValueError if it can't hold `num_tokens` tokens."""
        table = self._tables.setdefault(sequence_id, [])
        table.extend(new_pages)
        if len(table) * self._page_size < num_tokens:
            raise ValueError(f"sequence {sequence_id} has {len(table)} pages for {num_tokens} tokens")
        return table
