"""One step's attention: which rows read pages, which read dense copies, and what each layer does with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sapwood_kernels.dispatch import CpuOps
from sapwood_kernels.values import AttentionRule, HeadNorms, PagedSequence, batch_of
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.dense_kv import DenseCopy
from sapwood_server.model.kv import PagedKV
from sapwood_server.model.placement import PlacedRow
from sapwood_server.model.rope import rotation_matrices
from sapwood_server.model.weights import ModelWeights


@dataclass(frozen=True)
class AttentionShape:
    """What attention needs to know of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rule: AttentionRule
    head_norms: tuple[HeadNorms | None, ...]
    """One per layer."""

    @classmethod
    def of(cls, config: ModelConfig, weights: ModelWeights) -> AttentionShape:
        """The shape of a model's attention, with its weights."""
        norms = [
            HeadNorms(layer.q_norm, layer.k_norm, config.rms_norm_eps)
            if layer.q_norm is not None and layer.k_norm is not None
            else None
            for layer in weights.layers
        ]
        rule = AttentionRule(1 / math.sqrt(config.head_dim))
        return cls(config.num_heads, config.num_kv_heads, config.head_dim, rule, tuple(norms))


class StepAttention:
    """The attention of one step's rows, in the order of `placed`."""

    def __init__(
        self, ops: CpuOps, shape: AttentionShape, kv: PagedKV, cos_sin: Tensor, placed: Sequence[PlacedRow]
    ) -> None:
        self._kv = kv
        positions = [position for item in placed for position in range(item.row.start, item.num_keys)]
        rows = cos_sin.index_select(0, torch.tensor(positions, dtype=torch.int64))
        slots = torch.from_numpy(np.concatenate([item.slots(kv.page_size) for item in placed]))
        copies = [item.dense for item in placed if item.dense is not None]
        self._num_dense = len(copies)
        self._dense_slots = slots[: len(copies)]
        self._dense = DenseRows(ops, shape, rows[: len(copies)], copies) if copies else None
        paged = placed[len(copies) :]
        self._paged = PagedRows(ops, shape, kv, rows[len(copies) :], slots[len(copies) :], paged) if paged else None

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `decoder.Attend`."""
        if self._dense is not None and self._paged is None:
            return self._dense.attend(layer, qkv)
        parts = []
        if self._dense is not None:
            parts.append(self._dense.attend(layer, qkv[: self._num_dense]))
        if self._paged is not None:
            parts.append(self._paged.attend(layer, qkv[self._num_dense :]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self) -> None:
        """After the last layer."""
        if self._dense is not None:
            self._dense.finish(self._kv, self._dense_slots)


class PagedRows:
    """Rows that write their keys and values to pages in each layer, then attend to what the pages hold."""

    def __init__(
        self,
        ops: CpuOps,
        shape: AttentionShape,
        kv: PagedKV,
        cos_sin: Tensor,
        slots: Tensor,
        placed: Sequence[PlacedRow],
    ) -> None:
        self._ops = ops
        self._shape = shape
        self._kv = kv
        self._cos_sin = cos_sin
        self._slots = slots
        self._work = plan_rows(placed, kv)
        self._batch = batch_of(self._work)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `decoder.Attend`."""
        kv, rule = self._kv.layer(layer), self._shape.rule
        q = self._ops.rope_kv_store(qkv, self._cos_sin, self._slots, kv, self._shape.head_norms[layer])
        return self._ops.paged_prefill(q, kv, self._batch, self._work, rule).flatten(1)


def plan_rows(placed: Sequence[PlacedRow], kv: PagedKV) -> list[PagedSequence]:
    """Rows as the CPU's attention reads them, their queries side by side."""
    planned, first = [], 0
    for item in placed:
        used = torch.tensor(item.pages[: -(-item.num_keys // kv.page_size)], dtype=torch.int64)
        count = len(item.row.token_ids)
        planned.append(PagedSequence(first, count, used, item.num_keys, kv.pages.dtype))
        first += count
    return planned


class DenseRows:
    """One token each of sequences that have dense copies.

    A step of few tokens is mostly calls, so all that layers can share is prepared here, and each layer's views are made
    by one `unbind`.
    """

    def __init__(self, ops: CpuOps, shape: AttentionShape, cos_sin: Tensor, copies: Sequence[DenseCopy]) -> None:
        self._ops = ops
        self._shape = shape
        self._copies = copies
        self._rotations = rotation_matrices(cos_sin)
        num_rows, num_layers = len(copies), len(shape.head_norms)
        num_rotating = shape.num_heads + shape.num_kv_heads
        heads = torch.empty(num_layers, num_rows, num_rotating + shape.num_kv_heads, shape.head_dim)
        turned = torch.empty(num_layers, num_rows, num_rotating, shape.head_dim)
        queries = torch.empty(num_layers, num_rows, shape.num_heads, shape.head_dim, dtype=copies[0].dtype)
        self._new_keys = turned[:, :, shape.num_heads :]
        self._new_values = heads[:, :, num_rotating:]
        self._heads = heads.flatten(2).unbind()
        self._rotating = heads[:, :, :num_rotating].unbind()
        self._turned = turned.unbind()
        self._turned_queries = turned[:, :, : shape.num_heads].unbind()
        self._queries = queries.unbind()
        grouped = (num_layers, 1, shape.num_kv_heads, -1, shape.head_dim)
        self._rows = tuple(
            _DenseRow(
                queries=queries[:, row].view(grouped).unbind(),
                new_keys=self._new_keys[:, row].unbind(),
                new_values=self._new_values[:, row].unbind(),
                key_slots=copy.keys[:, :, copy.num_tokens].unbind(),
                value_slots=copy.values[:, :, copy.num_tokens].unbind(),
                keys=copy.keys[:, None, :, : copy.num_tokens + 1].unbind(),
                values=copy.values[:, None, :, : copy.num_tokens + 1].unbind(),
            )
            for row, copy in enumerate(copies)
        )

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `decoder.Attend`."""
        ops, shape = self._ops, self._shape
        self._heads[layer].copy_(qkv)
        norms = shape.head_norms[layer]
        if norms is not None:
            ops.norm_heads(self._rotating[layer], shape.num_heads, norms)
        ops.rotate(self._rotating[layer], self._rotations, self._turned[layer])
        self._queries[layer].copy_(self._turned_queries[layer])
        out = []
        for row in self._rows:
            row.key_slots[layer].copy_(row.new_keys[layer])
            row.value_slots[layer].copy_(row.new_values[layer])
            attended = ops.dense_decode(row.queries[layer], row.keys[layer], row.values[layer], shape.rule.scale)
            out.append(attended.view(1, -1))
        return out[0] if len(out) == 1 else torch.cat(out)

    def finish(self, kv: PagedKV, slots: Tensor) -> None:
        """After the last layer: the new tokens go to pages as well."""
        kv.store(slots, torch.stack((self._new_keys, self._new_values), dim=1).transpose(2, 3))
        for copy in self._copies:
            copy.num_tokens += 1


@dataclass(frozen=True)
class _DenseRow:
    """Views of one row, one per layer: the new token's heads, where they go, what they attend to."""

    queries: Sequence[Tensor]
    """[1, num_kv_heads, group, head_dim]."""
    new_keys: Sequence[Tensor]
    """[num_kv_heads, head_dim], and so are values and slots."""
    new_values: Sequence[Tensor]
    key_slots: Sequence[Tensor]
    value_slots: Sequence[Tensor]
    keys: Sequence[Tensor]
    """[1, num_kv_heads, num_keys, head_dim], and so are values."""
    values: Sequence[Tensor]
