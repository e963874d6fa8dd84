"""One step's attention by the Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_kernels.dispatch_triton import TritonOps
from sapwood_kernels.values import UNIT_SCALES
from sapwood_server.model.attention import AttentionShape
from sapwood_server.model.device_kv import DeviceKV
from sapwood_server.model.device_step import DecodeStep, DeviceStep, PrefillStep


class DeviceAttention:
    """Keys and values go to pages in each layer, then each phase attends to what the pages hold by its own kernel."""

    def __init__(self, ops: TritonOps, shape: AttentionShape, kv: DeviceKV, step: DeviceStep) -> None:
        self._ops = ops
        self._shape = shape
        self._kv = kv
        self._step = step

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """See `decoder.Attend`."""
        step, kv = self._step, self._kv.layer(layer)
        q = self._ops.rope_kv_store(qkv, step.cos_sin, step.slots, kv, self._shape.head_norms[layer])
        num_decoding = 0 if step.decode is None else step.decode.batch.num_keys.shape[0]
        parts = []
        if step.decode is not None:
            parts.append(self._decoded(q[:num_decoding], kv, step.decode))
        if step.prefill is not None:
            parts.append(self._prefilled(q[num_decoding:], kv, step.prefill))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)

    def _decoded(self, q: Tensor, kv: Tensor, step: DecodeStep) -> Tensor:
        ops, rule = self._ops, self._shape.rule
        partials = ops.paged_decode(q, kv, step.batch, step.work, rule, UNIT_SCALES, step.partials)
        out, _ = ops.merge_splits(partials, step.batch.num_keys, step.work, rule, q.dtype)
        return out

    def _prefilled(self, q: Tensor, kv: Tensor, step: PrefillStep) -> Tensor:
        return self._ops.paged_prefill(q, kv, step.batch, step.work, self._shape.rule)
