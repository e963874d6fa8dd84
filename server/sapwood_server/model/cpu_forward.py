"""The forward pass on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood_kernels.dispatch import CpuOps
from sapwood_server.model.attention import AttentionShape, StepAttention
from sapwood_server.model.decoder import Decoder
from sapwood_server.model.dense_kv import DenseKV
from sapwood_server.model.kv import BlockTables, PagedKV
from sapwood_server.model.loaded_model import Model
from sapwood_server.model.memory import KVPlan
from sapwood_server.model.placement import PlacedRow, place_dense, place_rows
from sapwood_server.model.rope import rotary_table
from sapwood_server.values.plan import StepPlan


class CpuForward:
    """See `runner.ForwardPass`."""

    def __init__(self, model: Model, ops: CpuOps, kv_plan: KVPlan, max_model_len: int) -> None:
        config = model.config
        self._ops = ops
        self._shape = AttentionShape.of(config, model.weights)
        self._decoder = Decoder(config, model.weights, ops, model.forms)
        self._kv = PagedKV(config, kv_plan.num_pages, kv_plan.page_size, model.dtype)
        self._tables = BlockTables(kv_plan.page_size)
        self._dense_kv = DenseKV(config, model.dtype, kv_plan.dense_bytes, max_model_len)
        self._cos_sin = rotary_table(config, min(max_model_len, kv_plan.num_tokens))

    def place(self, plan: StepPlan) -> list[PlacedRow]:
        """See `runner.ForwardPass`. Decode rows with dense copies come first."""
        self._tables.release(plan.released)
        self._dense_kv.release(plan.released)
        self._kv.copy(plan.copies)
        return place_dense(place_rows(plan, self._tables, self._kv), self._kv, self._dense_kv)

    def logits(self, placed: Sequence[PlacedRow], tokens: Sequence[int]) -> Tensor:
        """See `runner.ForwardPass`."""
        hidden = self._hidden_states(placed)
        if not tokens:
            return torch.empty(0)
        return self._decoder.logits(hidden if len(tokens) == len(hidden) else hidden[list(tokens)])

    def kv_pages(self, page: int) -> Tensor:
        """See `runner.ForwardPass`."""
        return self._kv.pages[:, :, :, page]

    def capture_graphs(self) -> None:
        """Nothing: a CPU has none."""

    def _hidden_states(self, placed: Sequence[PlacedRow]) -> Tensor:
        """Every token of the placed rows through the decoder, its KV written: [num_tokens, hidden]."""
        token_ids = torch.tensor([token for item in placed for token in item.row.token_ids], dtype=torch.int64)
        attention = StepAttention(self._ops, self._shape, self._kv, self._cos_sin, placed)
        hidden = self._decoder.forward(token_ids, attention.attend)
        attention.finish()
        return hidden
