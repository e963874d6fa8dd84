"""What each program of `paged_prefill` computes: a list of query blocks, built on the host once a step for all layers.

A block is up to `queries_per_block` consecutive queries of one sequence. Long blocks come first, so that what is left
at the end of a launch, when processors run out of work one by one, is short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.check import check_dtype, check_shape
from sapwood_kernels.config_table import AttentionConfig, padded_group


@dataclass(frozen=True)
class PrefillWork:
    """A list of `build_prefill_work` on the device, in buffers that may be larger than it.

    Raises ValueError for tensors of another shape or dtype.
    """

    items: Tensor
    """int32 [capacity, 2]: sequence and query block. Items from `count` on are never read."""
    count: Tensor
    """int32 [1]."""
    num_blocks: int
    """Programs per key-value head: the count, or more, up to capacity, where a launch must not depend on it."""
    config: AttentionConfig
    """What the list was built for."""
    arch: int
    """Compute capability that the config was looked up for, 90 for 9.0; INTERPRETER_ARCH on the CPU."""

    def __post_init__(self) -> None:
        check_shape("items", self.items, (None, 2))
        check_shape("count", self.count, (1,))
        for name in ("items", "count"):
            check_dtype(name, getattr(self, name), (torch.int32,))
        if not self.items.is_contiguous():
            raise ValueError(f"items has strides {list(self.items.stride())}; accepted: a contiguous tensor")
        if not 0 <= self.num_blocks <= self.items.shape[0]:
            raise ValueError(f"num_blocks is {self.num_blocks}; accepted: 0 to items' capacity, {self.items.shape[0]}")


def queries_per_block(config: AttentionConfig, group: int) -> int:
    """Queries of a program, each of which takes the rows of its group, padded to a power of two."""
    if not 1 <= group <= config.block_m:
        raise ValueError(f"group is {group}; accepted: 1 to block_m, {config.block_m}")
    return config.block_m // padded_group(group)


def build_prefill_work(
    num_queries: npt.NDArray[np.int32], num_keys: npt.NDArray[np.int32], config: AttentionConfig, group: int
) -> npt.NDArray[np.int32]:
    """Items int32 [num_items, 2], (sequence, query block): every query of a batch in exactly one.

    num_queries, num_keys int32 [num_sequences], as in PagedBatch. Sorted by the key tiles that a block reads without a
    window, most first; ties by sequence, then block, ascending. Raises ValueError for other arrays.
    """
    for name, counts in (("num_queries", num_queries), ("num_keys", num_keys)):
        if counts.dtype != np.int32 or counts.shape != num_queries.shape or counts.ndim != 1:
            raise ValueError(
                f"{name} is {counts.dtype} {list(counts.shape)}; accepted: int32 [num_sequences], both alike"
            )
        if counts.size and counts.min() < 0:
            raise ValueError(f"{name} holds {counts.min()}; accepted: 0 or more")
    block_q = queries_per_block(config, group)
    num_blocks = -(-num_queries // block_q)
    sequences = np.repeat(np.arange(num_queries.size), num_blocks)
    blocks = np.arange(sequences.size) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    queries_left_out = np.maximum(num_queries[sequences] - (blocks + 1) * block_q, 0)
    tiles = -(-(num_keys[sequences] - queries_left_out) // config.block_n)
    order = np.argsort(-np.maximum(tiles, 0), kind="stable")
    return np.stack((sequences, blocks), axis=1)[order].astype(np.int32)


def prefill_capacity(max_tokens: int, max_sequences: int, config: AttentionConfig, group: int) -> int:
    """The most items that a batch of at most so many tokens in so many sequences can have."""
    if max_tokens <= max_sequences:
        return max_tokens
    return max_sequences + (max_tokens - max_sequences) // queries_per_block(config, group)


def place_prefill_work(
    items: npt.NDArray[np.int32], config: AttentionConfig, arch: int, device: torch.device
) -> PrefillWork:
    """A list in device memory of just its size. A server copies lists into buffers that it keeps instead."""
    count = torch.tensor([items.shape[0]], dtype=torch.int32)
    return PrefillWork(torch.from_numpy(items).to(device), count.to(device), items.shape[0], config, arch)
