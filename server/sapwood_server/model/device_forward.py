"""The forward pass by the Triton kernels: on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.decode_layout import DecodeGrid
from sapwood_kernels.dispatch_triton import TritonOps
from sapwood_server.model.attention import AttentionShape
from sapwood_server.model.cuda_graphs import DecodeGraphs, Run
from sapwood_server.model.decoder import Decoder
from sapwood_server.model.device_attention import DeviceAttention
from sapwood_server.model.device_kv import DeviceKV
from sapwood_server.model.device_step import DeviceLimits, DeviceStep, StepBuffers
from sapwood_server.model.kernel_configs import KernelConfigs
from sapwood_server.model.kv import BlockTables
from sapwood_server.model.loaded_model import Model
from sapwood_server.model.placement import PlacedRow, place_rows
from sapwood_server.model.rope import rotary_table
from sapwood_server.model.staging import stage_new
from sapwood_server.model.step_inputs import idle_step, pad_step, step_inputs
from sapwood_server.values.plan import Phase, StepPlan


@dataclass(frozen=True, kw_only=True)
class DeviceSetup:
    """What a forward pass on a device is set up with."""

    device: torch.device
    kernels: KernelConfigs
    limits: DeviceLimits
    grid: DecodeGrid
    """Programs of the decode kernel."""
    deterministic: bool
    """Decode rows go through the prefill kernel, so that a token's bits don't depend on its phase."""
    graphs: DecodeGraphs | None
    """None: every step is launched kernel by kernel."""


class DeviceForward:
    """See `runner.ForwardPass`. Nothing in a step waits for the device."""

    def __init__(self, model: Model, ops: TritonOps, setup: DeviceSetup) -> None:
        config, limits, device = model.config, setup.limits, setup.device
        self._ops = ops
        self._setup = setup
        self._shape = AttentionShape.of(config, model.weights)
        self._decoder = Decoder(config, model.weights, ops, model.forms)
        self._kv = DeviceKV(config, limits.num_pages, limits.page_size, model.dtype, device)
        self._tables = BlockTables(limits.page_size)
        self._cos_sin = rotary_table(config, limits.max_model_len).to(device)
        grid = None if setup.deterministic else setup.grid
        self._buffers = StepBuffers(config, setup.kernels, limits, grid, device)
        num_rows = setup.graphs.max_rows if setup.graphs is not None else 0
        self._graph_logits = torch.empty(num_rows, config.vocab_size, device=device)

    def place(self, plan: StepPlan) -> list[PlacedRow]:
        """See `runner.ForwardPass`."""
        self._tables.release(plan.released)
        self._kv.copy(plan.copies)
        return place_rows(plan, self._tables, self._kv)

    def logits(self, placed: Sequence[PlacedRow], tokens: Sequence[int]) -> Tensor:
        """See `runner.ForwardPass`. A step of decode rows alone is replayed from a graph if there is one for it."""
        step = step_inputs(
            placed, self._tables, self._setup.limits.page_size, decode_by_prefill=self._setup.deterministic
        )
        wanted = np.array(tokens, dtype=np.int64)
        graphs = self._setup.graphs
        if graphs is not None and all(item.row.phase is Phase.DECODE for item in placed):
            bucket = graphs.bucket(len(placed))
            if bucket is not None:
                self._buffers.load(pad_step(step, bucket))
                graphs.replay(bucket)
                return self._rows(self._graph_logits, wanted)
        hidden = self._hidden_states(self._buffers.load(step))
        if not len(tokens):
            return hidden.new_empty(0)
        return self._decoder.logits(hidden if len(tokens) == step.num_tokens else self._rows(hidden, wanted))

    def kv_pages(self, page: int) -> Tensor:
        """See `runner.ForwardPass`."""
        return self._kv.pages[:, page]

    def capture_graphs(self) -> None:
        """See `runner.ForwardPass`. What is captured are steps of rows that touch nothing."""
        graphs = self._setup.graphs
        if graphs is not None:
            graphs.capture(self._run_of)
            self._kv.reset_reserved_page()

    def _run_of(self, num_rows: int) -> Run:
        """A decode step of so many rows, from whatever the buffers hold then to `_graph_logits`."""
        step = self._buffers.load(idle_step(num_rows, decode_by_prefill=self._setup.deterministic))

        def run() -> None:
            self._decoder.logits(self._hidden_states(step), out=self._graph_logits[:num_rows])

        return run

    def _hidden_states(self, step: DeviceStep) -> Tensor:
        """Every token of the step through the decoder, its KV written: [num_tokens, hidden]."""
        torch.index_select(self._cos_sin, 0, step.positions, out=step.cos_sin)
        attention = DeviceAttention(self._ops, self._shape, self._kv, step)
        return self._decoder.forward(step.token_ids, attention.attend)

    def _rows(self, tensor: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """These rows of a tensor, a copy."""
        return tensor.index_select(0, stage_new(rows, self._setup.device))
