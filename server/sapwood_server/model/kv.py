"""The pages that hold keys and values, and the block tables that say whose they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_server.model.config import ModelConfig
from sapwood_server.values.plan import PageCopy

_FIRST_ROWS = 64
_FIRST_COLUMNS = 64
"""Room of new block tables; doubled when it is full."""


class PageBounds:
    """Which pages there are, for whoever is told to write to one."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size

    def check_page(self, page: int) -> None:
        """Raises ValueError for a page that does not exist, and for page 0."""
        if not 0 < page < self.num_pages:
            raise ValueError(f"page is {page}; accepted: 1 to {self.num_pages - 1}")

    def check_copies(self, copies: Iterable[PageCopy]) -> None:
        """Raises ValueError for a copy that can't be."""
        for copy in copies:
            self.check_page(copy.source)
            self.check_page(copy.target)
            if not 0 < copy.num_slots <= self.page_size:
                raise ValueError(f"num_slots is {copy.num_slots}; accepted: 1 to {self.page_size}")


class PagedKV(PageBounds):
    """Keys and values of every layer on the CPU, in pages of `page_size` tokens.

    One tensor `[num_layers, 2, num_kv_heads, num_pages, page_size, head_dim]`: a head's tokens lie side by side within
    a page, so a gather copies runs of `page_size * head_dim` elements and its result is what attention reads. Page 0
    is reserved: zero, never written.
    """

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        super().__init__(num_pages, page_size)
        shape = (config.num_layers, 2, config.num_kv_heads, num_pages, page_size, config.head_dim)
        self.pages = untouched_zeros(shape, dtype)
        self.num_layers = config.num_layers
        self._layers: tuple[Tensor, ...] = tuple(layer.permute(2, 0, 1, 3, 4) for layer in self.pages)
        # [num_layers * 2 * num_kv_heads, num_slots, head_dim]
        self._slots = self.pages.flatten(3, 4).flatten(0, 2)

    def layer(self, index: int) -> Tensor:
        """One layer as the ops take it, `[num_pages, 2, num_kv_heads, page_size, head_dim]`, a view."""
        return self._layers[index]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies the first slots of pages to other pages, in every layer. Sources are read before any is written."""
        self.check_copies(copies)
        sources = [self.pages[:, :, :, copy.source, : copy.num_slots].clone() for copy in copies]
        for copy, source in zip(copies, sources, strict=True):
            self.pages[:, :, :, copy.target, : copy.num_slots] = source

    def gather(self, layer: int, pages: Tensor) -> Tensor:
        """The tokens of `pages` int64 [n] in one layer: [2, num_kv_heads, n * page_size, head_dim]."""
        return self.pages[layer].index_select(2, pages).flatten(2, 3)

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Writes tokens of every layer. slots int64 [n]; tokens [num_layers, 2, num_kv_heads, n, head_dim]."""
        self._slots.index_copy_(1, slots, tokens.flatten(0, 2).to(self._slots.dtype))


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros as the operating system gives them: memory that is resident only once it is written. (`torch.zeros` writes
    them, and 4 GiB of them take seconds.)"""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(*shape)


class BlockTables:
    """The pages of each sequence, in order, kept from step to step: a row of one array for each."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: npt.NDArray[np.int32] = np.zeros((_FIRST_ROWS, _FIRST_COLUMNS), dtype=np.int32)
        self._counts = [0] * _FIRST_ROWS
        self._rows: dict[int, int] = {}
        self._free_rows = list(range(_FIRST_ROWS))

    def __len__(self) -> int:
        return len(self._rows)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forgets sequences; those never seen (their first step failed) are no error."""
        for sequence_id in sequence_ids:
            row = self._rows.pop(sequence_id, None)
            if row is not None:
                self._counts[row] = 0
                self._free_rows.append(row)

    def extend(self, sequence_id: int, new_pages: Sequence[int], num_tokens: int) -> npt.NDArray[np.int32]:
        """Appends `new_pages` to the sequence's table and returns it, a view that is good for this step.

        ValueError if it can't hold `num_tokens` tokens.
        """
        row = self._rows.get(sequence_id)
        if row is None:
            row = self._rows[sequence_id] = self._take_row()
        count = self._counts[row] + len(new_pages)
        while count > self._pages.shape[1]:
            self._pages = np.concatenate((self._pages, np.zeros_like(self._pages)), axis=1)
        if len(new_pages):
            self._pages[row, self._counts[row] : count] = new_pages
            self._counts[row] = count
        if count * self._page_size < num_tokens:
            raise ValueError(f"sequence {sequence_id} has {count} pages for {num_tokens} tokens")
        return self._pages[row, :count]

    def gather(self, sequence_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """A copy of these sequences' tables, one below the other: [len(sequence_ids), pages of the longest]. Behind a
        shorter one lies what nobody may read."""
        rows = [self._rows[sequence_id] for sequence_id in sequence_ids]
        return self._pages[rows, : max((self._counts[row] for row in rows), default=0)]

    def _take_row(self) -> int:
        if not self._free_rows:
            num_rows = len(self._counts)
            self._pages = np.concatenate((self._pages, np.zeros_like(self._pages)))
            self._counts += [0] * num_rows
            self._free_rows = list(range(num_rows, 2 * num_rows))
        return self._free_rows.pop()
