"""Random sequences in a pool of pages that is poisoned wherever no kernel may look.

What a sequence holds depends on the seed alone, where its pages lie on `placement` alone: two placements of one world
must give equal bits. Slots that hold no token are NaN; table entries behind a sequence's own pages name no page.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sapwood_kernels.values import UNIT_SCALES, KVScales, PagedBatch

NO_PAGE = 2**30
"""Far past any pool: a load from there ends the process, unless it is masked."""


@dataclass(frozen=True, kw_only=True)
class WorldShape:
    """What every sequence of a world has in common."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """None: `dtype`."""
    scales: KVScales = UNIT_SCALES


@dataclass(frozen=True)
class SharedPrefix:
    """A sequence's first tokens are those of an earlier one, in the same pages."""

    sequence: int
    num_keys: int
    """A multiple of the page size."""


@dataclass(frozen=True)
class Chunk:
    """The queries of one sequence at positions `[start, stop)`, when it has `stop` keys."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True)
class PagedWorld:
    """A pool with sequences in it, and a query of each of their tokens."""

    shape: WorldShape
    kv: Tensor
    """[num_pages, 2, num_kv_heads, page_size, head_dim]."""
    block_table: Tensor
    """int32 [num_sequences, max_pages]."""
    queries: tuple[Tensor, ...]
    """Of each sequence, [num_keys, num_heads, head_dim]."""
    strided: bool = False

    def batch(self, chunks: Sequence[Chunk]) -> PagedBatch:
        """The chunks side by side, in the order given."""
        counts = [chunk.stop - chunk.start for chunk in chunks]
        return PagedBatch(
            block_table=self.block_table[[chunk.sequence for chunk in chunks]],
            num_keys=torch.tensor([chunk.stop for chunk in chunks], dtype=torch.int32),
            first_query=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        )

    def q(self, chunks: Sequence[Chunk]) -> Tensor:
        """The queries of `batch(chunks)`, [num_tokens, num_heads, head_dim]."""
        rows = torch.cat([self.queries[chunk.sequence][chunk.start : chunk.stop] for chunk in chunks])
        q = _poisoned(tuple(rows.shape), rows.dtype, self.strided)
        return q.copy_(rows)

    def whole(self) -> list[Chunk]:
        """Every sequence with all its tokens as queries."""
        return [Chunk(number, 0, queries.shape[0]) for number, queries in enumerate(self.queries)]

    def last(self) -> list[Chunk]:
        """Every sequence with its last token as the only query; those without tokens are left out."""
        return [Chunk(number, chunk.stop - 1, chunk.stop) for number, chunk in enumerate(self.whole()) if chunk.stop]

    def forget(self, sequence: int, keys: slice) -> PagedWorld:
        """The same world with some of a sequence's keys NaN: not written yet, or given to somebody else since."""
        kv = self.kv.clone()
        page_size = self.shape.page_size
        for key in range(self.queries[sequence].shape[0])[keys]:
            kv[self.block_table[sequence, key // page_size], :, :, key % page_size] = float("nan")
        return replace(self, kv=kv)

    def without_pages(self, sequence: int, num_pages: int) -> PagedWorld:
        """The same world without a sequence's first pages: freed since a window has left them."""
        table = self.block_table.clone()
        table[sequence, :num_pages] = NO_PAGE
        return replace(self.forget(sequence, slice(0, num_pages * self.shape.page_size)), block_table=table)


def make_world(
    lengths: Sequence[int],
    shape: WorldShape,
    *,
    seed: int = 0,
    placement: int = 0,
    shared: dict[int, SharedPrefix] | None = None,
    strided: bool = False,
) -> PagedWorld:
    """Sequences of the given numbers of tokens; `shared` says for some which earlier one they begin as.

    strided: kv and what `q` gives are parts of larger tensors, whose other elements are NaN.
    """
    shared = shared or {}
    counts = [-(-length // shape.page_size) for length in lengths]
    num_pages = 1 + sum(counts) + 3
    free = (1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(placement))).tolist()
    kv = _poisoned(
        (num_pages, 2, shape.num_kv_heads, shape.page_size, shape.head_dim), shape.kv_dtype or shape.dtype, strided
    )
    kv[0] = torch.zeros(kv.shape[1:]).to(kv.dtype)
    table = torch.full((len(lengths), max([*counts, 1]) + 1), NO_PAGE, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    queries = []
    for number, length in enumerate(lengths):
        tokens = torch.randn((length, 2, shape.num_kv_heads, shape.head_dim), generator=generator)
        q = torch.randn((length, shape.num_heads, shape.head_dim), generator=generator)
        queries.append(q.to(shape.dtype))
        prefix = shared.get(number, SharedPrefix(0, 0))
        kept = prefix.num_keys // shape.page_size
        table[number, :kept] = table[prefix.sequence, :kept]
        for page in range(kept, counts[number]):
            table[number, page] = free.pop()
        _write(kv, table[number], tokens, prefix.num_keys, shape.scales)
    return PagedWorld(shape, kv, table, tuple(queries), strided)


def _write(kv: Tensor, pages: Tensor, tokens: Tensor, first: int, scales: KVScales) -> None:
    """Stores the tokens from the one at position `first` on, as a kernel would: divided by their scales."""
    page_size = kv.shape[3]
    divisors = torch.tensor([scales.key, scales.value])[:, None, None]
    for position in range(first, tokens.shape[0]):
        kv[pages[position // page_size], :, :, position % page_size] = (tokens[position] / divisors).to(kv.dtype)


def _poisoned(sizes: tuple[int, ...], dtype: torch.dtype, strided: bool) -> Tensor:
    """NaN everywhere. Strided: with gaps in each dimension, of sizes that keep rows aligned."""
    if not strided:
        return torch.full(sizes, float("nan")).to(dtype)
    *outer, last = sizes
    larger = torch.full([size + 1 for size in outer] + [last + 16], float("nan")).to(dtype)
    return larger[tuple(slice(0, size) for size in outer)][..., :last]
