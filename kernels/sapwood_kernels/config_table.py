"""Tile sizes of the attention kernels, looked up by what a kernel is compiled for. Nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sapwood_kernels.values import AttentionPhase

INTERPRETER_ARCH = 0
"""In place of a compute capability, where Triton's interpreter runs kernels on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ConfigKey:
    """What decides a config. Never a batch's size or a length: bits may depend on a config."""

    arch: int
    """Compute capability, 90 for 9.0."""
    head_dim: int
    group: int
    """Query heads to a key-value head."""
    dtype: torch.dtype
    """Of queries."""
    phase: AttentionPhase


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A compiled kernel's constants."""

    block_m: int
    """Rows of a program: queries times heads of a group, padded to a power of two."""
    block_n: int
    """Keys of a tile. Tiles start at multiples of it, counted from position 0."""
    num_warps: int
    num_stages: int
    max_registers: int
    """Per thread, as the compile gate has seen it; the gate fails above it."""
    split_size: int = 0
    """Decode: keys of a split, a multiple of `block_n` and of every page size. 0 for prefill."""
