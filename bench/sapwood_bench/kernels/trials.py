"""One call of an op that is bound by memory, with what it should give and who else computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_bench.kernels.cases import VOCABULARY
from sapwood_bench.kernels.timing import Call


@dataclass(frozen=True, kw_only=True)
class OpSizes:
    """Of a model."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    """Of logits; a little more than there are tokens, as padded heads have it."""

    @property
    def num_tokens(self) -> int:
        """Ids that stand for tokens."""
        return self.vocabulary - self.vocabulary // 500


LLAMA_8B_SIZES = OpSizes(
    hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocabulary=VOCABULARY
)
TINY_SIZES = OpSizes(hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=64, vocabulary=300)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An op on inputs of its own."""

    ours: Call
    wanted: Callable[[], Sequence[Tensor]]
    """By the plain formula, on copies."""
    rivals: dict[str, Call]
    num_bytes: int


Make = Callable[[int, OpSizes, torch.Generator, torch.dtype], Trial]
"""`make(num_rows, sizes, generator, dtype)`, on the generator's device."""
