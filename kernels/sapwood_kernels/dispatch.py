"""Which implementation of the ops runs on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sapwood_kernels import cpu, reference
from sapwood_kernels.values import HeadNorms, PagedSequence


class Ops(Protocol):
    """The ops; `reference` says what each computes."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def rope_kv_store(
        self, qkv: Tensor, cos_sin: Tensor, slots: Tensor, kv: Tensor, head_norms: HeadNorms | None
    ) -> Tensor: ...
    def paged_prefill(self, q: Tensor, kv: Tensor, sequences: Sequence[PagedSequence], scale: float) -> Tensor: ...
    def paged_decode(self, q: Tensor, kv: Tensor, sequences: Sequence[PagedSequence], scale: float) -> Tensor: ...


class CpuOps(Ops, Protocol):
    """Besides the ops of every device, those of the CPU's decode over dense copies of the KV."""

    def rotate(self, x: Tensor, rotations: Tensor, out: Tensor) -> None: ...
    def norm_heads(self, heads: Tensor, num_heads: int, head_norms: HeadNorms) -> None: ...
    def dense_decode(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None: ...


def cpu_ops() -> CpuOps:
    """The fast ops of the CPU."""
    return cpu


def reference_ops() -> CpuOps:
    """The plain formulas, on any device."""
    return reference
