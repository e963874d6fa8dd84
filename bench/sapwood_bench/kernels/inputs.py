"""A case's tensors: random keys in pages at random places, NaN wherever no kernel may look."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_bench.kernels.cases import AttentionCase
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, KVScales, PagedBatch

IntArray = npt.NDArray[np.int32]

NO_PAGE = 2**30
"""In tables behind a row's own pages: a load from there is an illegal access, unless it is masked."""
FP8_SCALES = KVScales(key=0.37, value=2.9)
"""Neither is 1, so that a kernel that drops one is far off."""
_TABLE_MULTIPLE = 16
"""Columns of a table, as the server allocates it: rows then start at multiples of 64 bytes."""
_SPARE_PAGES = 3


@dataclass(frozen=True, kw_only=True)
class PhaseTensors:
    """The sequences of one phase, on the device and, for planning, on the host."""

    q: Tensor
    """[num_queries, num_heads, head_dim]."""
    batch: PagedBatch
    block_table: IntArray
    """[num_sequences, max_pages]."""
    num_keys: IntArray
    num_queries: IntArray
    """Both [num_sequences]."""

    def row(self, sequence: int) -> PhaseTensors:
        """One sequence alone."""
        first, last = self.batch.first_query[sequence : sequence + 2].tolist()
        rows = slice(sequence, sequence + 1)
        return phase_tensors(self.q[first:last], self.block_table[rows], self.num_keys[rows], self.num_queries[rows])


@dataclass(frozen=True, kw_only=True)
class AttentionInputs:
    """What one call attends with."""

    case: AttentionCase
    kv: Tensor
    """[num_pages, 2, num_kv_heads, page_size, head_dim]."""
    decode: PhaseTensors | None
    prefill: PhaseTensors | None
    rule: AttentionRule
    scales: KVScales


def make_inputs(case: AttentionCase, device: torch.device, *, seed: int = 0, placement: int = 0) -> AttentionInputs:
    """What keys and queries hold depends on `seed` alone, where pages lie on `placement` alone."""
    generator = torch.Generator(device).manual_seed(seed)
    tables, num_pages = _tables(case, placement)
    dtype, heads = getattr(torch, case.dtype), case.heads
    scales = UNIT_SCALES if case.kv_dtype in (None, case.dtype) else FP8_SCALES
    kv = _fill_pages(case, tables, num_pages, generator, scales)
    sinks = torch.randn(heads.num_heads, generator=generator, device=device) if case.sinks else None
    rule = AttentionRule(heads.head_dim**-0.5, case.window, case.softcap, sinks)
    num_decode = len(case.decode)

    def phase(rows: slice, num_keys: Sequence[int], num_queries: Sequence[int]) -> PhaseTensors | None:
        if not num_keys:
            return None
        shape = (sum(num_queries), heads.num_heads, heads.head_dim)
        q = torch.randn(shape, generator=generator, device=device).to(dtype)
        return phase_tensors(q, tables[rows], np.array(num_keys, np.int32), np.array(num_queries, np.int32))

    return AttentionInputs(
        case=case,
        kv=kv,
        decode=phase(slice(0, num_decode), case.decode, [1] * num_decode),
        prefill=phase(
            slice(num_decode, None),
            [chunk.num_keys for chunk in case.prefill],
            [chunk.num_queries for chunk in case.prefill],
        ),
        rule=rule,
        scales=scales,
    )


def phase_tensors(q: Tensor, block_table: IntArray, num_keys: IntArray, num_queries: IntArray) -> PhaseTensors:
    """The arrays, and the same on q's device."""

    def put(array: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(q.device)

    first_query = np.array([0, *itertools.accumulate(num_queries.tolist())], dtype=np.int32)
    batch = PagedBatch(block_table=put(block_table), num_keys=put(num_keys), first_query=put(first_query))
    return PhaseTensors(q=q, batch=batch, block_table=block_table, num_keys=num_keys, num_queries=num_queries)


def _tables(case: AttentionCase, placement: int) -> tuple[IntArray, int]:
    """[num_sequences, max_pages], decode rows first; and the pages of the pool."""
    lengths = [*case.decode, *(chunk.num_keys for chunk in case.prefill)]
    counts = [-(-length // case.page_size) for length in lengths]
    columns = -(-max([*counts, 1]) // _TABLE_MULTIPLE) * _TABLE_MULTIPLE
    own = [np.arange(count) for count in counts]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    num_pages = 1 + int(offsets[-1]) + _SPARE_PAGES
    places = 1 + np.random.default_rng(placement).permutation(num_pages - 1)
    table = np.full((len(lengths), columns), NO_PAGE, dtype=np.int32)
    for row, pages in enumerate(own):
        table[row, : len(pages)] = places[offsets[row] + pages]
    for shared in case.shared:
        kept = shared.num_keys // case.page_size
        table[shared.first_row : shared.first_row + shared.num_rows, :kept] = table[shared.first_row, :kept]
    return table, num_pages


def _fill_pages(
    case: AttentionCase, tables: IntArray, num_pages: int, generator: torch.Generator, scales: KVScales
) -> Tensor:
    """Sequence by sequence in the order of the case, so that placement moves keys and changes none."""
    heads, device = case.heads, generator.device
    dtype = getattr(torch, case.kv_dtype or case.dtype)
    shape = (num_pages, 2, heads.num_kv_heads, case.page_size, heads.head_dim)
    kv = torch.full(shape, float("nan"), device=device, dtype=getattr(torch, case.dtype)).to(dtype)
    kv[0] = torch.zeros(shape[1:], device=device).to(dtype)
    divisors = torch.tensor([scales.key, scales.value], device=device)[:, None, None, None]
    lengths = [*case.decode, *(chunk.num_keys for chunk in case.prefill)]
    first_pages = dict.fromkeys(range(len(lengths)), 0)
    for shared in case.shared:
        kept = shared.num_keys // case.page_size
        first_pages |= dict.fromkeys(range(shared.first_row + 1, shared.first_row + shared.num_rows), kept)
    for row, length in enumerate(lengths):
        pages = tables[row, first_pages[row] : -(-length // case.page_size)]
        if not len(pages):
            continue
        tokens = torch.randn((len(pages), *shape[1:]), generator=generator, device=device) / divisors
        used = length % case.page_size
        if used:
            tokens[-1, :, :, used:] = float("nan")
        # As plain bytes, since not every torch writes 8-bit floats by index.
        places = torch.from_numpy(pages).to(device).long()
        kv.view(torch.uint8)[places] = tokens.to(dtype).view(torch.uint8)
    return kv
