"""The ops as Triton kernels. Apart from `dispatch`, because it imports triton, which an installation for CPUs lacks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sapwood_kernels.add_rms_norm import add_rms_norm, rms_norm
from sapwood_kernels.decode_work import DecodeWork
from sapwood_kernels.dispatch import Ops
from sapwood_kernels.logit_edits import LogitEdits
from sapwood_kernels.logits_prepare import logits_prepare
from sapwood_kernels.merge_splits import merge_splits
from sapwood_kernels.paged_decode import paged_decode
from sapwood_kernels.paged_prefill import paged_prefill
from sapwood_kernels.partials import Partials
from sapwood_kernels.prefill_work import PrefillWork
from sapwood_kernels.rope_kv_store import rope_kv_store
from sapwood_kernels.sample import SamplingTensors, sample
from sapwood_kernels.silu_mul import silu_mul
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, KVScales, PagedBatch


class TritonOps(Ops, Protocol):
    """Besides the ops of every device: attention by work lists, and sampling."""

    def paged_prefill(
        self,
        q: Tensor,
        kv: Tensor,
        batch: PagedBatch,
        work: PrefillWork,
        rule: AttentionRule,
        scales: KVScales = UNIT_SCALES,
    ) -> Tensor: ...
    def paged_decode(
        self,
        q: Tensor,
        kv: Tensor,
        batch: PagedBatch,
        work: DecodeWork,
        rule: AttentionRule,
        scales: KVScales,
        partials: Partials,
    ) -> Partials: ...
    def merge_splits(
        self, partials: Partials, num_keys: Tensor, work: DecodeWork, rule: AttentionRule, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]: ...
    def logits_prepare(
        self,
        logits: Tensor,
        num_tokens: int,
        edits: LogitEdits | None = None,
        bitmask: Tensor | None = None,
        bitmask_rows: Tensor | None = None,
    ) -> None: ...
    def sample(self, logits: Tensor, settings: SamplingTensors) -> Tensor: ...


class _TritonOps:
    """The ops are functions; this gathers them."""

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    silu_mul = staticmethod(silu_mul)
    rope_kv_store = staticmethod(rope_kv_store)
    paged_prefill = staticmethod(paged_prefill)
    paged_decode = staticmethod(paged_decode)
    merge_splits = staticmethod(merge_splits)
    logits_prepare = staticmethod(logits_prepare)
    sample = staticmethod(sample)


def triton_ops() -> TritonOps:
    """The kernels of this package."""
    return _TritonOps()
