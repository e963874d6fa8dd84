"""One decoder for every architecture, in terms of ops and linear layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sapwood_kernels.dispatch import Ops
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.linear import Linear, LinearForms, make_linear
from sapwood_server.model.weights import LayerWeights, ModelWeights

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]) -> [num_tokens, num_heads * head_dim]: rotates,
stores keys and values, attends."""


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's linears, and the norm that follows each of its two halves."""

    qkv: Linear
    o: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear
    next_norm: Tensor
    """The next layer's input norm; the last layer's is the final norm."""


class Decoder:
    """The forward pass. The residual stream is fp32, what linears take and give is `dtype`."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops, forms: LinearForms) -> None:
        self._eps = config.rms_norm_eps
        self._ops = ops
        self._embedding = weights.embedding
        self._first_norm = weights.layers[0].input_norm
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        self._layers = tuple(
            _make_layer(layer, norm, forms) for layer, norm in zip(weights.layers, next_norms, strict=True)
        )
        self._lm_head = make_linear(weights.lm_head, None, forms)

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """token_ids int64 [num_tokens] -> hidden states after the final norm, [num_tokens, hidden]."""
        ops, eps = self._ops, self._eps
        embedded = functional.embedding(token_ids, self._embedding)
        residual = embedded.float() if embedded.dtype != torch.float32 else embedded
        x = ops.rms_norm(residual, self._first_norm, eps, embedded.dtype)
        for index, layer in enumerate(self._layers):
            attended = layer.o(attend(index, layer.qkv(x)))
            x = ops.add_rms_norm(attended, residual, layer.post_attention_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            x = ops.add_rms_norm(x, residual, layer.next_norm, eps)
        return x

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [n, hidden] -> fp32 [n, vocab_size], in `out` if it is given."""
        logits = self._lm_head(hidden)
        return logits.float() if out is None else out.copy_(logits)


def _make_layer(weights: LayerWeights, next_norm: Tensor, forms: LinearForms) -> DecoderLayer:
    return DecoderLayer(
        qkv=make_linear(weights.qkv, weights.qkv_bias, forms),
        o=make_linear(weights.o, None, forms),
        post_attention_norm=weights.post_attention_norm,
        gate_up=make_linear(weights.gate_up, None, forms),
        down=make_linear(weights.down, None, forms),
        next_norm=next_norm,
    )
