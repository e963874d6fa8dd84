"""Runs decode attention on a poisoned world: from block tables to the merged answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sapwood_kernels import reference_decode
from sapwood_kernels.config_table import INTERPRETER_ARCH, AttentionConfig
from sapwood_kernels.decode_layout import DecodeGrid, DecodeLayout
from sapwood_kernels.decode_work import DecodeLists, DecodeWork, build_decode_work
from sapwood_kernels.merge_splits import merge_splits
from sapwood_kernels.paged_decode import paged_decode
from sapwood_kernels.partials import Partials
from sapwood_kernels.values import AttentionRule, PagedBatch
from support.ops import assert_close
from support.paged_world import NO_PAGE, Chunk, PagedWorld

GARBAGE = 2**30
"""In work buffers behind the counts: no row, no split."""
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class DecodeRun:
    """How decode is run: small tiles and splits, so that short sequences have several, and few programs, so that each
    takes several items."""

    rule: AttentionRule = field(default_factory=lambda: AttentionRule(scale=0.125))
    group: bool = True
    wide: bool = True
    row_blocks: int = 2
    block_m: int = 16
    split_size: int = 64
    list_window: int | None = None
    """Of the work list."""
    spare: int = 2
    """Room for so many more partials than there are."""
    grid: DecodeGrid = field(default_factory=lambda: DecodeGrid(num_programs=3, wide_programs=2))

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(
            block_m=self.block_m,
            block_n=32,
            num_warps=4,
            num_stages=1,
            max_registers=255,
            split_size=self.split_size,
            row_blocks=self.row_blocks,
            max_wide_registers=255 if self.row_blocks > 1 else 0,
        )


@dataclass(frozen=True)
class DecodeInputs:
    """Everything that the two ops are called with."""

    q: Tensor
    kv: Tensor
    batch: PagedBatch
    work: DecodeWork
    lists: DecodeLists
    partials: Partials


@dataclass(frozen=True)
class Decoded:
    """What came out."""

    out: Tensor
    lse: Tensor
    partials: Partials
    lists: DecodeLists

    def of_row(self, row: int) -> tuple[Tensor, ...]:
        """A row's answer and its partials. (Of a list without a window: there the partials of a row end where the next
        one's begin.)"""
        ends = [*self.lists.first_partial.tolist(), len(self.lists.rows)]
        parts = (self.partials.maximum, self.partials.total, self.partials.acc)
        return (self.out[row], self.lse[row], *(part[ends[row] : ends[row + 1]] for part in parts))


def decode(world: PagedWorld, run: DecodeRun, chunks: Sequence[Chunk] | None = None, padding: int = 0) -> Decoded:
    """The kernels' answer for these rows, by default the last token of every sequence, and `padding` empty rows."""
    inputs = decode_inputs(world, run, chunks, padding)
    paged_decode(inputs.q, inputs.kv, inputs.batch, inputs.work, run.rule, world.shape.scales, inputs.partials)
    out, lse = merge_splits(inputs.partials, inputs.batch.num_keys, inputs.work, run.rule, inputs.q.dtype)
    return Decoded(out, lse, inputs.partials, inputs.lists)


def formula(world: PagedWorld, run: DecodeRun, chunks: Sequence[Chunk] | None = None, padding: int = 0) -> Decoded:
    """The same by `reference_decode`."""
    inputs = decode_inputs(world, run, chunks, padding)
    reference_decode.paged_decode(
        inputs.q, inputs.kv, inputs.batch, inputs.work, run.rule, world.shape.scales, inputs.partials
    )
    out, lse = reference_decode.merge_splits(
        inputs.partials, inputs.batch.num_keys, inputs.work, run.rule, inputs.q.dtype
    )
    return Decoded(out, lse, inputs.partials, inputs.lists)


def decode_inputs(
    world: PagedWorld, run: DecodeRun, chunks: Sequence[Chunk] | None = None, padding: int = 0
) -> DecodeInputs:
    """Work buffers hold garbage and partials NaN wherever nothing has been put yet."""
    chunks = world.last() if chunks is None else chunks
    batch = padded(world.batch(chunks), padding)
    empty = torch.full((padding, world.shape.num_heads, world.shape.head_dim), float("nan")).to(world.shape.dtype)
    layout = layout_of(world, run, batch)
    lists = build_decode_work(batch.block_table.numpy(), batch.num_keys.numpy(), layout, group=run.group, wide=run.wide)
    work = DecodeWork.allocate(layout, len(batch.num_keys), run.grid, CPU)
    for buffer in (work.items, work.wide_items, work.rows, work.counts, work.first_partial):
        if buffer is not None:
            buffer.fill_(GARBAGE)
    work.load(lists)
    partials = poisoned_partials(layout.capacity, world.shape.num_heads, world.shape.head_dim)
    return DecodeInputs(torch.cat((world.q(chunks), empty)), world.kv, batch, work, lists, partials)


def layout_of(world: PagedWorld, run: DecodeRun, batch: PagedBatch) -> DecodeLayout:
    """Room for the batch's splits and `spare` more."""
    splits = -(-batch.num_keys.numpy() // run.split_size)
    return DecodeLayout(
        config=run.config,
        arch=INTERPRETER_ARCH,
        group=world.shape.num_heads // world.shape.num_kv_heads,
        page_size=world.shape.page_size,
        num_pages=world.kv.shape[0],
        capacity=int(splits.sum()) + run.spare,
        window=run.list_window,
    )


def padded(batch: PagedBatch, padding: int) -> PagedBatch:
    """The batch with rows behind it that have a query and no key, as a CUDA graph of a larger size has them."""
    width = batch.block_table.shape[1]
    return replace(
        batch,
        block_table=torch.cat((batch.block_table, torch.full((padding, width), NO_PAGE, dtype=torch.int32))),
        num_keys=torch.cat((batch.num_keys, torch.zeros(padding, dtype=torch.int32))),
        first_query=torch.arange(len(batch.num_keys) + padding + 1, dtype=torch.int32),
    )


def poisoned_partials(capacity: int, num_heads: int, head_dim: int) -> Partials:
    """NaN everywhere, and parts of larger tensors: no two strides are those of dense ones."""
    sizes = torch.full((2, capacity, num_heads + 5), float("nan"))[..., :num_heads]
    acc = torch.full((capacity, num_heads + 1, head_dim + 16), float("nan"))[:, :num_heads, :head_dim]
    return Partials(maximum=sizes[0], total=sizes[1], acc=acc)


def assert_answers(found: Decoded, wanted: Decoded, rule: AttentionRule) -> None:
    """The kernels' answers are the formula's, up to roundings, and so is what was left unwritten."""
    factor = 1.0 if wanted.out.dtype == torch.float32 else 2.0
    assert_close(found.out, wanted.out, factor)
    empty = torch.isinf(wanted.lse)
    assert torch.equal(found.lse[empty], wanted.lse[empty])
    if not empty.all():
        assert_close(found.lse[~empty], wanted.lse[~empty], factor=4.0)
    unwritten = torch.isnan(found.partials.maximum)
    assert not (unwritten & ~torch.isnan(wanted.partials.maximum)).any()
    if rule.window is None:
        assert torch.equal(unwritten, torch.isnan(wanted.partials.maximum)), "a partial that belongs to no row"


def assert_bits(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Equal as bits, NaN included."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
