"""Weights drawn at random, for measuring a model of some shape without its files."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sapwood_server.model.config import ModelConfig
from sapwood_server.model.matrix import Matrix
from sapwood_server.model.weights import LayerWeights, ModelWeights, WeightPlacement

SEED = 0


def random_weights(config: ModelConfig, placement: WeightPlacement) -> ModelWeights:
    """Normal with a deviation of `1 / sqrt(columns)`, so that activations keep their size from layer to layer; norms
    are ones. Never zeros: a GPU multiplies those faster than other numbers."""
    draw = _Draw(placement)
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = draw.matrix(*vocabulary)
    return ModelWeights(
        embedding=embedding.dense,
        layers=tuple(_random_layer(config, draw) for _ in range(config.num_layers)),
        final_norm=draw.ones(config.hidden_size),
        lm_head=embedding if config.tie_word_embeddings else draw.matrix(*vocabulary),
    )


class _Draw:
    """Tensors of one generator, made where they stay."""

    def __init__(self, placement: WeightPlacement) -> None:
        self._placement = placement
        self._generator = torch.Generator(placement.device).manual_seed(SEED)

    def normal(self, *shape: int, deviation: float) -> Tensor:
        tensor = torch.empty(shape, dtype=self._placement.dtype, device=self._placement.device)
        return tensor.normal_(0.0, deviation, generator=self._generator)

    def matrix(self, rows: int, columns: int) -> Matrix:
        return Matrix(self.normal(rows, columns, deviation=1 / math.sqrt(columns)))

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=torch.float32, device=self._placement.device)


def _random_layer(config: ModelConfig, draw: _Draw) -> LayerWeights:
    hidden_size, head_dim = config.hidden_size, config.head_dim
    qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim
    return LayerWeights(
        input_norm=draw.ones(hidden_size),
        qkv=draw.matrix(qkv_rows, hidden_size),
        qkv_bias=draw.normal(qkv_rows, deviation=0.5) if config.qkv_bias else None,
        q_norm=draw.ones(head_dim) if config.qk_norm else None,
        k_norm=draw.ones(head_dim) if config.qk_norm else None,
        o=draw.matrix(hidden_size, config.num_heads * head_dim),
        post_attention_norm=draw.ones(hidden_size),
        gate_up=draw.matrix(2 * config.intermediate_size, hidden_size),
        down=draw.matrix(hidden_size, config.intermediate_size),
    )
