"""The ops as the model room sees them, and which implementation of them runs on a device.

Every implementation of an op has one signature. An attention op is told twice what to attend to: `batch` says it in
plain tensors, `work` is the same batch planned for the device, once a step for all layers: sequences on the CPU, work
lists on a GPU. The fast ops read their `work`; `reference_attention` reads `batch` alone, so a wrong plan shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sapwood_kernels import cpu, cpu_deterministic
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, HeadNorms, KVScales, PagedBatch, PagedSequence


class Ops(Protocol):
    """The ops that every device has; `reference` says what each computes."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def silu_mul(self, gate_up: Tensor) -> Tensor: ...
    def rope_kv_store(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        slots: Tensor,
        kv: Tensor,
        head_norms: HeadNorms | None,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor: ...


class CpuOps(Ops, Protocol):
    """The CPU's. One op attends to pages, in both phases; the rest is for decoding from dense copies of the KV."""

    def paged_prefill(
        self,
        q: Tensor,
        kv: Tensor,
        batch: PagedBatch,
        work: Sequence[PagedSequence],
        rule: AttentionRule,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor: ...
    def rotate(self, x: Tensor, rotations: Tensor, out: Tensor) -> None: ...
    def norm_heads(self, heads: Tensor, num_heads: int, head_norms: HeadNorms) -> None: ...
    def dense_decode(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor: ...


def cpu_ops(*, deterministic: bool = False) -> CpuOps:
    """The fast ops of the CPU, or those whose rows have the same bits in every batch."""
    return cpu_deterministic if deterministic else cpu
