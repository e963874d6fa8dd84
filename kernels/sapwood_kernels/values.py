"""What ops take besides tensors."""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sapwood_kernels.check import check_indices


class AttentionPhase(enum.Enum):
    """Which attention kernel computes a row. It is the plan's choice, never that of a count: see `paged_prefill`."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms over each query and key head, before the rotation (Qwen3)."""

    query: Tensor
    """fp32 [head_dim]."""
    key: Tensor
    """fp32 [head_dim]."""
    eps: float


@dataclass(frozen=True)
class AttentionRule:
    """How one layer's scores become weights. Window and softcap are constants of a compiled kernel."""

    scale: float
    """Of `q k^T`."""
    window: int | None = None
    """A query at position p sees the keys at `(p - window, p]`; None: all up to p."""
    softcap: float | None = None
    """`cap * tanh(score / cap)`, after the scale (Gemma 2)."""
    sinks: Tensor | None = None
    """fp32 [num_heads]: a score of each head that takes weight and has no value (gpt-oss)."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; accepted: 1 or more, or None")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; accepted: a number over 0, or None")


@dataclass(frozen=True)
class KVScales:
    """What pages of 8 bits are multiplied with when they are read; what is stored was divided by it."""

    key: float = 1.0
    value: float = 1.0

    def __post_init__(self) -> None:
        for name, scale in (("key", self.key), ("value", self.value)):
            if not 0 < scale < float("inf"):
                raise ValueError(f"{name} scale is {scale}; accepted: a finite number over 0")


UNIT_SCALES = KVScales()


@dataclass(frozen=True)
class PagedBatch:
    """The sequences of one phase in a step: their queries lie side by side in q, their keys in pages.

    Query `i` of a sequence's `n` sees the keys at positions `[0, num_keys - n + 1 + i)`, less what a window hides. A
    sequence may have no query, and one without keys gives zeros (padding of a CUDA graph).
    """

    block_table: Tensor
    """int32 [num_sequences, max_pages]. What lies behind a sequence's own pages is never read."""
    num_keys: Tensor
    """int32 [num_sequences], this step's tokens included."""
    first_query: Tensor
    """int32 [num_sequences + 1]: the row of q with each sequence's first query, then the number of rows."""


@dataclass(frozen=True)
class PagedSequence:
    """A sequence of a PagedBatch as the CPU's ops read it, planned once a step and used by every layer.

    Raises ValueError if the counts can't be.
    """

    first_query: int
    """Row of the step's `q` that holds its first query."""
    num_queries: int
    pages: Tensor
    """int64 [ceil(num_keys / page_size)]."""
    num_keys: int
    dtype: torch.dtype
    """Of `q`."""

    def __post_init__(self) -> None:
        if not 0 < self.num_queries <= self.num_keys:
            raise ValueError(f"num_queries is {self.num_queries}; accepted: 1 to num_keys, {self.num_keys}")
        check_indices("pages", self.pages, 1, 2**31)

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """What each query sees, as a bias to add to scores: 0 or -inf, [num_queries, num_keys]. None where causality
        itself says it: one query that sees everything, or as many queries as keys."""
        if self.num_queries in (1, self.num_keys):
            return None
        hidden = torch.full((self.num_queries, self.num_keys), float("-inf"), dtype=self.dtype)
        return hidden.triu_(self.num_keys - self.num_queries + 1)


def batch_of(sequences: Sequence[PagedSequence]) -> PagedBatch:
    """The same sequences as tensors; each one's queries follow those of the one before it."""
    counts = [sequence.num_queries for sequence in sequences]
    return PagedBatch(
        block_table=pad_sequence([sequence.pages.int() for sequence in sequences], batch_first=True),
        num_keys=torch.tensor([sequence.num_keys for sequence in sequences], dtype=torch.int32),
        first_query=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
    )
