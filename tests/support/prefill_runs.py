"""Runs prefill attention on a poisoned world, in Triton's interpreter, and the formula beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sapwood_kernels import reference_attention
from sapwood_kernels.config_table import INTERPRETER_ARCH, AttentionConfig
from sapwood_kernels.paged_prefill import paged_prefill
from sapwood_kernels.prefill_work import PrefillWork, build_prefill_work
from sapwood_kernels.values import AttentionRule, PagedBatch
from support.ops import assert_close
from support.paged_world import Chunk, PagedWorld

Op = Callable[..., Tensor]

GARBAGE = 2**30
"""In work buffers behind the count: no sequence, no block."""


@dataclass(frozen=True, kw_only=True)
class PrefillRun:
    """How prefill is run: small tiles, so that short sequences have several."""

    rule: AttentionRule = field(default_factory=lambda: AttentionRule(scale=0.125))
    block_m: int = 32
    block_n: int = 32
    op: Op = paged_prefill

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(block_m=self.block_m, block_n=self.block_n, num_warps=4, num_stages=1, max_registers=255)


def prefill(world: PagedWorld, run: PrefillRun, chunks: Sequence[Chunk] | None = None) -> Tensor:
    """The kernel's answer for these chunks, by default every sequence whole."""
    chunks = world.whole() if chunks is None else chunks
    return attend(world, run, world.q(chunks), world.batch(chunks))


def attend(world: PagedWorld, run: PrefillRun, q: Tensor, batch: PagedBatch) -> Tensor:
    """The kernel's answer for a batch of any making."""
    return run.op(q, world.kv, batch, plan(world, run, batch), run.rule, world.shape.scales)


def plan(world: PagedWorld, run: PrefillRun, batch: PagedBatch) -> PrefillWork:
    """The work in buffers with room for more, and a program too many."""
    group = world.shape.num_heads // world.shape.num_kv_heads
    items = build_prefill_work(batch.first_query.diff().numpy(), batch.num_keys.numpy(), run.config, group)
    buffer = torch.full((len(items) + 3, 2), GARBAGE, dtype=torch.int32)
    buffer[: len(items)] = torch.from_numpy(items)
    count = torch.tensor([len(items)], dtype=torch.int32)
    return PrefillWork(buffer, count, len(items) + 1, run.config, INTERPRETER_ARCH)


def formula(world: PagedWorld, run: PrefillRun, chunks: Sequence[Chunk] | None = None) -> Tensor:
    """The same by `reference_attention`."""
    chunks = world.whole() if chunks is None else chunks
    return reference_attention.paged_prefill(
        world.q(chunks), world.kv, world.batch(chunks), None, run.rule, world.shape.scales
    )


def padded(batch: PagedBatch, num_queries: int) -> PagedBatch:
    """The batch with one more sequence that has queries and no key, as padding has them."""
    garbage = torch.full((1, batch.block_table.shape[1]), GARBAGE, dtype=torch.int32)
    return replace(
        batch,
        block_table=torch.cat((batch.block_table, garbage)),
        num_keys=torch.cat((batch.num_keys, torch.zeros(1, dtype=torch.int32))),
        first_query=torch.cat((batch.first_query, batch.first_query[-1:] + num_queries)),
    )


def assert_answers(found: Tensor, wanted: Tensor) -> None:
    """The formula's, up to roundings: weights are rounded to 16 bits before they meet the values, and the interpreter
    cuts off what doesn't fit bf16."""
    assert_close(found, wanted, factor=1.0 if wanted.dtype == torch.float32 else 2.0)


def assert_bits(found: Tensor, wanted: Tensor) -> None:
    """Equal as bits."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
