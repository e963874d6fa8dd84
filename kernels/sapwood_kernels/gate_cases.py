"""The attention kernels as the compile gate sees them: each config's own launch, with the smallest tensors that do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sapwood_kernels.config_table import AttentionConfig, ConfigKey
from sapwood_kernels.decode_layout import DecodeGrid, DecodeLayout
from sapwood_kernels.decode_work import DecodeWork, build_decode_work
from sapwood_kernels.gate import CompiledKernel, compile_launch
from sapwood_kernels.paged_decode import paged_decode
from sapwood_kernels.paged_prefill import paged_prefill
from sapwood_kernels.partials import allocate_partials
from sapwood_kernels.prefill_work import build_prefill_work, place_prefill_work
from sapwood_kernels.values import AttentionPhase, AttentionRule, KVScales, PagedBatch

_CPU = torch.device("cpu")
# Two, because a 1 would be compiled into the kernel; many models have as many heads on each of several devices.
_NUM_KV_HEADS = 2
# Not a multiple of 16: a server's tables have any number of columns.
_TABLE_COLUMNS = 5
_NUM_PAGES = 3


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One way to compile an attention kernel."""

    key: ConfigKey
    config: AttentionConfig
    kv_dtype: torch.dtype | None = None
    """Of the pages; None: that of the key."""
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def compile_attention(case: AttentionCase) -> list[CompiledKernel]:
    """The kernels of one case: prefill's one; decode's narrow form and, if the config has one, its wide form.

    Raises what `compile_launch` does, and ValueError for a case that the launchers refuse.
    """
    key = case.key
    num_heads = _NUM_KV_HEADS * key.group
    batch = PagedBatch(
        block_table=torch.ones(1, _TABLE_COLUMNS, dtype=torch.int32),
        num_keys=torch.ones(1, dtype=torch.int32),
        first_query=torch.tensor([0, 1], dtype=torch.int32),
    )
    rule = AttentionRule(
        scale=key.head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        sinks=torch.zeros(num_heads) if case.sinks else None,
    )
    q = torch.zeros(1, num_heads, key.head_dim, dtype=key.dtype)
    pages = (_NUM_PAGES, 2, _NUM_KV_HEADS, case.page_size, key.head_dim)
    kv = torch.zeros(pages, dtype=case.kv_dtype or key.dtype)
    scales = KVScales(key=0.5, value=0.5) if case.kv_dtype else KVScales()
    if key.phase is AttentionPhase.PREFILL:
        items = build_prefill_work(np.ones(1, np.int32), np.ones(1, np.int32), case.config, key.group)
        prefill_work = place_prefill_work(items, case.config, key.arch, _CPU)
        return compile_launch(key.arch, lambda: paged_prefill(q, kv, batch, prefill_work, rule, scales))
    decode_work = _decode_work(case, batch)
    partials = allocate_partials(decode_work.layout.capacity, num_heads, key.head_dim, _CPU)
    return compile_launch(key.arch, lambda: paged_decode(q, kv, batch, decode_work, rule, scales, partials))


def _decode_work(case: AttentionCase, batch: PagedBatch) -> DecodeWork:
    layout = DecodeLayout(
        config=case.config,
        arch=case.key.arch,
        group=case.key.group,
        page_size=case.page_size,
        num_pages=_NUM_PAGES,
        capacity=1,
        window=case.window,
    )
    work = DecodeWork.allocate(layout, 1, DecodeGrid(num_programs=1, wide_programs=1), _CPU)
    work.load(build_decode_work(batch.block_table.numpy(), batch.num_keys.numpy(), layout))
    return work
