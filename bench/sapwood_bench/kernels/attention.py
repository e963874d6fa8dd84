"""Our attention on a case's tensors, planned once and called many times, as a step calls it for each layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_bench.kernels.inputs import AttentionInputs, PhaseTensors
from sapwood_kernels.config_table import AttentionConfig, ConfigKey, attention_config, device_arch
from sapwood_kernels.decode_layout import DecodeLayout, resident_grid
from sapwood_kernels.decode_work import DecodeWork, build_decode_work
from sapwood_kernels.merge_splits import merge_splits
from sapwood_kernels.paged_decode import paged_decode
from sapwood_kernels.paged_prefill import paged_prefill
from sapwood_kernels.partials import Partials, allocate_partials
from sapwood_kernels.prefill_work import PrefillWork, build_prefill_work, place_prefill_work
from sapwood_kernels.values import AttentionPhase

INTERPRETER_PROGRAMS = 1


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How the work of a batch is cut."""

    group: bool = True
    """Decode rows that share pages share items."""
    wide: bool = True
    decode: AttentionConfig | None = None
    """None: the table's."""
    prefill: AttentionConfig | None = None
    arch: int | None = None
    """None: the device's."""


DEFAULT_PLAN = PlanOptions()


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What attention gives, None where a case has no row of the phase."""

    decode: Tensor | None
    """[num_rows, num_heads, head_dim], and so is prefill."""
    lse: Tensor | None
    """fp32 [num_rows, num_heads], of decode rows."""
    prefill: Tensor | None


@dataclass(frozen=True, kw_only=True)
class PlannedAttention:
    """Inputs and their work lists."""

    inputs: AttentionInputs
    decode_work: DecodeWork | None
    partials: Partials | None
    prefill_work: PrefillWork | None

    def run(self) -> Outputs:
        """Decode rows by K3 and K4, prefill rows by K2."""
        inputs, out, lse, prefilled = self.inputs, None, None, None
        if inputs.decode is not None and self.decode_work is not None and self.partials is not None:
            part = inputs.decode
            paged_decode(part.q, inputs.kv, part.batch, self.decode_work, inputs.rule, inputs.scales, self.partials)
            out, lse = merge_splits(self.partials, part.batch.num_keys, self.decode_work, inputs.rule, part.q.dtype)
        if inputs.prefill is not None and self.prefill_work is not None:
            part = inputs.prefill
            prefilled = paged_prefill(part.q, inputs.kv, part.batch, self.prefill_work, inputs.rule, inputs.scales)
        return Outputs(decode=out, lse=lse, prefill=prefilled)


def plan_attention(inputs: AttentionInputs, options: PlanOptions = DEFAULT_PLAN) -> PlannedAttention:
    """Looks up configs and builds the work lists. ValueError for what no config is made for."""
    decode_work = partials = prefill_work = None
    if inputs.decode is not None:
        decode_work = _plan_decode(inputs, inputs.decode, options)
        heads = inputs.case.heads
        partials = allocate_partials(decode_work.layout.capacity, heads.num_heads, heads.head_dim, inputs.kv.device)
    if inputs.prefill is not None:
        config, arch = _config(inputs, AttentionPhase.PREFILL, options.prefill, options.arch)
        items = build_prefill_work(inputs.prefill.num_queries, inputs.prefill.num_keys, config, inputs.case.heads.group)
        prefill_work = place_prefill_work(items, config, arch, inputs.kv.device)
    return PlannedAttention(inputs=inputs, decode_work=decode_work, partials=partials, prefill_work=prefill_work)


def _plan_decode(inputs: AttentionInputs, part: PhaseTensors, options: PlanOptions) -> DecodeWork:
    config, arch = _config(inputs, AttentionPhase.DECODE, options.decode, options.arch)
    layout = DecodeLayout(
        config=config,
        arch=arch,
        group=inputs.case.heads.group,
        page_size=inputs.case.page_size,
        num_pages=inputs.kv.shape[0],
        capacity=max(int((-(-part.num_keys // config.split_size)).sum()), 1),
        window=inputs.rule.window,
    )
    device = inputs.kv.device
    programs = INTERPRETER_PROGRAMS
    if device.type == "cuda":
        programs = torch.cuda.get_device_properties(device).multi_processor_count
    work = DecodeWork.allocate(layout, len(part.num_keys), resident_grid(config, programs), device, wide=options.wide)
    work.load(build_decode_work(part.block_table, part.num_keys, layout, group=options.group, wide=options.wide))
    return work


def _config(
    inputs: AttentionInputs, phase: AttentionPhase, given: AttentionConfig | None, arch: int | None
) -> tuple[AttentionConfig, int]:
    arch = device_arch(inputs.kv.device) if arch is None else arch
    heads, dtype = inputs.case.heads, getattr(torch, inputs.case.dtype)
    key = ConfigKey(arch=arch, head_dim=heads.head_dim, group=heads.group, dtype=dtype, phase=phase)
    return (given or attention_config(key)), arch
