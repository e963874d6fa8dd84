"""Launches of the ops without a config of their own, for the compile gate: a model's shapes, and values of no use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sapwood_kernels.add_rms_norm import add_rms_norm, rms_norm
from sapwood_kernels.config_table import ConfigKey, attention_config
from sapwood_kernels.decode_layout import DecodeGrid, DecodeLayout
from sapwood_kernels.decode_work import DecodeWork
from sapwood_kernels.gate import CompiledKernel, compile_launch
from sapwood_kernels.logit_edits import RowEdits, build_logit_edits, place_logit_edits
from sapwood_kernels.logits_prepare import logits_prepare
from sapwood_kernels.merge_splits import merge_splits
from sapwood_kernels.partials import allocate_partials
from sapwood_kernels.rope_kv_store import rope_kv_store
from sapwood_kernels.sample import SamplingTensors, sample
from sapwood_kernels.silu_mul import silu_mul
from sapwood_kernels.values import AttentionPhase, AttentionRule, HeadNorms

HIDDEN = 4096
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
VOCABULARY = 151936
CPU = torch.device("cpu")


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def store(kv_dtype: torch.dtype, head_norms: HeadNorms | None = None) -> None:
    kv = torch.zeros(2, 2, KV_HEADS, 16, HEAD_DIM, dtype=kv_dtype)
    qkv = bf16(1, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    rope_kv_store(qkv, torch.zeros(1, HEAD_DIM), torch.tensor([16]), kv, head_norms)


def store_normed() -> None:
    store(torch.bfloat16, HeadNorms(torch.ones(HEAD_DIM), torch.ones(HEAD_DIM), 1e-6))


def merge() -> None:
    key = ConfigKey(arch=90, head_dim=HEAD_DIM, group=4, dtype=torch.bfloat16, phase=AttentionPhase.DECODE)
    layout = DecodeLayout(
        config=attention_config(key), arch=90, group=HEADS // KV_HEADS, page_size=16, num_pages=2, capacity=1
    )
    work = DecodeWork.allocate(layout, 1, DecodeGrid(num_programs=1, wide_programs=1), CPU)
    rule = AttentionRule(scale=1.0, window=100, sinks=torch.zeros(HEADS))
    partials = allocate_partials(1, HEADS, HEAD_DIM, CPU)
    merge_splits(partials, torch.ones(1, dtype=torch.int32), work, rule, torch.bfloat16)


def prepare() -> None:
    """Its two kernels."""
    edits = place_logit_edits(build_logit_edits([RowEdits(banned_ids=[1])], VOCABULARY - 10), CPU)
    bitmask = torch.zeros(1, VOCABULARY // 32, dtype=torch.int32)
    logits_prepare(torch.zeros(1, VOCABULARY), VOCABULARY - 10, edits, bitmask, torch.zeros(1, dtype=torch.int32))


def draw() -> None:
    ones = torch.ones(1)
    settings = SamplingTensors(
        temperature=ones,
        top_k=torch.full((1,), 50, dtype=torch.int32),
        top_p=ones,
        min_p=ones,
        seed=torch.zeros(1, dtype=torch.int64),
        choice=torch.zeros(1, dtype=torch.int32),
        position=torch.zeros(1, dtype=torch.int32),
    )
    sample(torch.zeros(1, VOCABULARY), settings)


LAUNCHES: dict[str, Callable[[], object]] = {
    "rope_kv_store": lambda: store(torch.bfloat16),
    "rope_kv_store, heads normed": store_normed,
    "rope_kv_store, e4m3": lambda: store(torch.float8_e4m3fn),
    "merge_splits": merge,
    "rms_norm": lambda: rms_norm(bf16(1, HIDDEN), torch.ones(HIDDEN), 1e-6, torch.bfloat16),
    "add_rms_norm": lambda: add_rms_norm(bf16(1, HIDDEN), torch.zeros(1, HIDDEN), torch.ones(HIDDEN), 1e-6),
    "silu_mul": lambda: silu_mul(bf16(1, 2 * HIDDEN)),
    "logits_prepare": prepare,
    "sample": draw,
}


def compile_op(case: tuple[int, str]) -> list[CompiledKernel] | str:
    """The kernels that one of LAUNCHES starts on a compute capability, or the error."""
    arch, name = case
    try:
        return compile_launch(arch, LAUNCHES[name])
    except Exception as error:  # noqa: BLE001 - whatever Triton raises is the finding
        return f"{type(error).__name__}: {error}"
