"""Where a step's inputs lie on a device: buffers of fixed size and place, so that a CUDA graph can hold them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.attention_check import check_block_table
from sapwood_kernels.decode_layout import DecodeGrid, DecodeLayout
from sapwood_kernels.decode_work import DecodeWork, build_decode_work
from sapwood_kernels.partials import Partials, allocate_partials
from sapwood_kernels.prefill_work import PrefillWork, build_prefill_work, prefill_capacity
from sapwood_kernels.values import PagedBatch
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.kernel_configs import KernelConfigs
from sapwood_server.model.staging import stage
from sapwood_server.model.step_inputs import PhaseInputs, StepInputs

_TABLE_MULTIPLE = 16
"""Columns of a block table: its rows then start at multiples of 64 bytes, which the kernels are compiled for."""


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """The most that a step may hold."""

    num_tokens: int
    num_sequences: int
    max_model_len: int
    page_size: int
    num_pages: int
    """Of the pool, the reserved page 0 included."""

    @property
    def max_rows(self) -> int:
        """Rows of a decode step, which have one token each."""
        return min(self.num_sequences, self.num_tokens)

    @property
    def max_pages(self) -> int:
        """Columns of a block table."""
        pages = -(-self.max_model_len // self.page_size)
        return -(-pages // _TABLE_MULTIPLE) * _TABLE_MULTIPLE


class PhaseBuffers:
    """The sequences of one phase."""

    def __init__(self, limits: DeviceLimits, device: torch.device) -> None:
        num_sequences = limits.num_sequences
        self._block_table = torch.zeros(num_sequences, limits.max_pages, dtype=torch.int32, device=device)
        self._num_keys = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        self._first_query = torch.zeros(num_sequences + 1, dtype=torch.int32, device=device)

    def load(self, inputs: PhaseInputs) -> None:
        """Copies a step's arrays. ValueError for more sequences or pages than there is room for."""
        stage(self._block_table, inputs.block_table)
        stage(self._num_keys, inputs.num_keys)
        stage(self._first_query, inputs.first_query)

    def batch(self, num_sequences: int) -> PagedBatch:
        """Views of the first `num_sequences`."""
        return PagedBatch(
            block_table=self._block_table[:num_sequences],
            num_keys=self._num_keys[:num_sequences],
            first_query=self._first_query[: num_sequences + 1],
        )


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """The step's prefill rows and their work."""

    batch: PagedBatch
    work: PrefillWork


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The step's decode rows and their work."""

    batch: PagedBatch
    work: DecodeWork
    partials: Partials


@dataclass(frozen=True, kw_only=True)
class DeviceStep:
    """A step's inputs on the device, views of the buffers. Tokens of decode rows, one each, come first."""

    token_ids: Tensor
    """int64 [num_tokens], and so are positions and slots."""
    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    """fp32 [num_tokens, head_dim]: the forward pass fills it."""
    decode: DecodeStep | None
    """None: no row of this phase."""
    prefill: PrefillStep | None


class DecodeBuffers:
    """The decode phase: sequences, work and partial results."""

    def __init__(
        self, config: ModelConfig, kernels: KernelConfigs, limits: DeviceLimits, grid: DecodeGrid, device: torch.device
    ) -> None:
        self._sequences = PhaseBuffers(limits, device)
        self._layout = DecodeLayout(
            config=kernels.decode,
            arch=kernels.arch,
            group=config.num_heads // config.num_kv_heads,
            page_size=limits.page_size,
            num_pages=limits.num_pages,
            capacity=limits.num_sequences * -(-limits.max_model_len // kernels.decode.split_size),
        )
        self._work = DecodeWork.allocate(self._layout, limits.num_sequences, grid, device)
        self._partials = allocate_partials(self._layout.capacity, config.num_heads, config.head_dim, device)

    def load(self, inputs: PhaseInputs) -> DecodeStep:
        """Copies a step's arrays and plans its work."""
        self._sequences.load(inputs)
        self._work.load(build_decode_work(inputs.block_table, inputs.num_keys, self._layout), copy=stage)
        return DecodeStep(batch=self._sequences.batch(inputs.num_sequences), work=self._work, partials=self._partials)


class StepBuffers:
    """The buffers that every step uses, one after the other."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: KernelConfigs,
        limits: DeviceLimits,
        grid: DecodeGrid | None,
        device: torch.device,
    ) -> None:
        """grid: programs of the decode kernel; None: no row is ever of the decode phase."""
        self._kernels = kernels
        self._group = config.num_heads // config.num_kv_heads
        self._token_ids, self._positions, self._slots = (
            torch.zeros(limits.num_tokens, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._cos_sin = torch.zeros(limits.num_tokens, config.head_dim, device=device)
        self._limits = limits
        self._prefill = PhaseBuffers(limits, device)
        self._decode = None if grid is None else DecodeBuffers(config, kernels, limits, grid, device)
        num_items = prefill_capacity(limits.num_tokens, limits.num_sequences, kernels.prefill, self._group)
        self._prefill_items = torch.zeros(num_items, 2, dtype=torch.int32, device=device)
        self._prefill_count = torch.zeros(1, dtype=torch.int32, device=device)

    def load(self, step: StepInputs) -> DeviceStep:
        """Copies a step's inputs and plans its attention.

        ValueError for more than there is room for, and for a page that is not in the pool.
        """
        stage(self._token_ids, step.token_ids)
        stage(self._positions, step.positions)
        stage(self._slots, step.slots)
        decode = self._load_decode(step.decode) if step.decode.num_sequences else None
        num_items = 0
        if step.prefill.num_sequences:
            self._prefill.load(step.prefill)
            num_queries, num_keys = step.prefill.num_queries, step.prefill.num_keys
            check_block_table(step.prefill.block_table, num_keys, self._limits.page_size, self._limits.num_pages)
            items = build_prefill_work(num_queries, num_keys, self._kernels.prefill, self._group)
            num_items = len(items)
            stage(self._prefill_items, items)
            stage(self._prefill_count, np.array([num_items], dtype=np.int32))
        return self._views(step, decode, num_items)

    def _load_decode(self, inputs: PhaseInputs) -> DecodeStep:
        if self._decode is None:
            raise ValueError(
                f"the step has {inputs.num_sequences} decode rows; accepted: none, without a decode kernel"
            )
        return self._decode.load(inputs)

    def _views(self, step: StepInputs, decode: DecodeStep | None, num_items: int) -> DeviceStep:
        num_tokens, num_prefilling = step.num_tokens, step.prefill.num_sequences
        work = PrefillWork(
            self._prefill_items, self._prefill_count, num_items, self._kernels.prefill, self._kernels.arch
        )
        return DeviceStep(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slots=self._slots[:num_tokens],
            cos_sin=self._cos_sin[:num_tokens],
            decode=decode,
            prefill=PrefillStep(batch=self._prefill.batch(num_prefilling), work=work) if num_prefilling else None,
        )
