"""One step's attention: which rows read pages, which read dense copies, and what each layer does with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sapwood_kernels.dispatch import CpuOps
from sapwood_kernels.values import HeadNorms, PagedSequence, plan_sequence
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.dense_kv import DenseCopy
from sapwood_server.model.kv import PagedKV
from sapwood_server.model.placement import PlacedRow
from sapwood_server.model.rope import rotation_matrices
from sapwood_server.model.weights import ModelWeights
from sapwood_server.values.plan import Phase


@dataclass(frozen=True)
class AttentionShape:
    """What attention needs to know of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
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
        scale = 1 / math.sqrt(config.head_dim)
        return cls(config.num_heads, config.num_kv_heads, config.head_dim, scale, tuple(norms))


class StepAttention:
    """The attention of one step's rows, in the order of `placed`."""

    def __init__(
        self, ops: CpuOps, shape: AttentionShape, kv: PagedKV, cos_sin: Tensor, placed: Sequence[PlacedRow]
    ) -> None:
        self._kv = kv
        positions = [position for item in placed for position in range(item.row.start, item.num_keys)]
        rows = cos_sin.index_select(0, torch.tensor(positions, dtype=torch.int64))
        slots = torch.tensor([slot for item in placed for slot in item.slots(kv.page_size)], dtype=torch.int64)
        copies = [item.dense for item in placed if item.dense is not None]
        self._num_dense = len(copies)
        self._dense_slots = slots[: len(copies)]
        self._dense = DenseRows(ops, shape, rows[: len(copies)], copies) if copies else None
        paged = placed[len(copies) :]
        self._paged = PagedRows(ops, shape, kv, rows[len(copies) :], slots[len(copies) :]) if paged else None
        if self._paged is not None:
            self._paged.plan(paged)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `decoder.Attend`."""
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

    def __init__(self, ops: CpuOps, shape: AttentionShape, kv: PagedKV, cos_sin: Tensor, slots: Tensor) -> None:
        self._ops = ops
        self._shape = shape
        self._kv = kv
        self._cos_sin = cos_sin
        self._slots = slots
        self._decoding: list[PagedSequence] = []
        self._prefilling: list[PagedSequence] = []

    def plan(self, placed: Sequence[PlacedRow]) -> None:
        """Decode rows, then prefill rows; each of the two counts its queries from 0."""
        self._decoding = self._sequences([item for item in placed if item.row.phase is Phase.DECODE])
        self._prefilling = self._sequences([item for item in placed if item.row.phase is Phase.PREFILL])

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `decoder.Attend`."""
        kv = self._kv.layer(layer)
        q = self._ops.rope_kv_store(qkv, self._cos_sin, self._slots, kv, self._shape.head_norms[layer])
        num_decoding = len(self._decoding)
        parts = []
        if self._decoding:
            parts.append(self._ops.paged_decode(q[:num_decoding], kv, self._decoding, self._shape.scale))
        if self._prefilling:
            parts.append(self._ops.paged_prefill(q[num_decoding:], kv, self._prefilling, self._shape.scale))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _sequences(self, placed: Sequence[PlacedRow]) -> list[PagedSequence]:
        planned, first = [], 0
        for item in placed:
            used = torch.tensor(item.pages[: -(-item.num_keys // self._kv.page_size)], dtype=torch.int64)
            count = len(item.row.token_ids)
            planned.append(plan_sequence(first, count, used, item.num_keys, self._kv.pages.dtype))
            first += count
        return planned


class DenseRows:
    """One token each of sequences that have dense copies. Everything that layers share is prepared once a step."""

    def __init__(self, ops: CpuOps, shape: AttentionShape, cos_sin: Tensor, copies: Sequence[DenseCopy]) -> None:
        self._ops = ops
        self._shape = shape
        self._copies = copies
        self._rotations = rotation_matrices(cos_sin)
        rows, heads = len(copies), shape.num_heads + 2 * shape.num_kv_heads
        self._heads = torch.empty(rows, heads, shape.head_dim)
        self._rotating = self._heads[:, : shape.num_heads + shape.num_kv_heads]
        self._turned = torch.empty(self._rotating.shape)
        self._out = torch.empty(rows, shape.num_heads, shape.head_dim)
        grouped = (rows, shape.num_kv_heads, -1, shape.head_dim)
        self._queries = self._turned[:, : shape.num_heads].view(grouped).unbind()
        self._new_keys = self._turned[:, shape.num_heads :].unbind()
        self._new_values = self._heads[:, shape.num_heads + shape.num_kv_heads :].unbind()
        self._outs = self._out.view(grouped).unbind()
        counts = [copy.num_tokens for copy in copies]
        pairs = list(zip(copies, counts, strict=True))
        self._key_slots = [copy.keys[..., count].unbind() for copy, count in pairs]
        self._value_slots = [copy.values[..., count, :].unbind() for copy, count in pairs]
        self._keys = [copy.keys[..., : count + 1].unbind() for copy, count in pairs]
        self._values = [copy.values[..., : count + 1, :].unbind() for copy, count in pairs]

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `decoder.Attend`."""
        self._heads.view_as(qkv).copy_(qkv)
        norms = self._shape.head_norms[layer]
        if norms is not None:
            self._ops.norm_heads(self._rotating, self._shape.num_heads, norms)
        self._ops.rotate(self._rotating, self._rotations, self._turned)
        for row, query in enumerate(self._queries):
            self._key_slots[row][layer].copy_(self._new_keys[row])
            self._value_slots[row][layer].copy_(self._new_values[row])
            keys, values = self._keys[row][layer], self._values[row][layer]
            self._ops.dense_decode(query, keys, values, self._shape.scale, self._outs[row])
        return self._out.flatten(1).to(qkv.dtype)

    def finish(self, kv: PagedKV, slots: Tensor) -> None:
        """After the last layer: the new tokens go to pages as well."""
        kv.store(slots, torch.stack([copy.token(copy.num_tokens) for copy in self._copies], dim=3))
        for copy in self._copies:
            copy.num_tokens += 1
