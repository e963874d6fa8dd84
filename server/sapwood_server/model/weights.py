"""A decoder's weights in memory: every tensor of the checkpoint used exactly once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import read_gguf_header
from sapwood_server.formats.model_files import ModelFiles
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.gguf_source import GgufSource
from sapwood_server.model.matrix import Matrix, PackedQ4, merge_packed
from sapwood_server.model.safetensors_source import SafetensorsSource
from sapwood_server.quoting import quote


class TensorSource(Protocol):
    """A checkpoint that gives each tensor once, by Hugging Face's name."""

    def fill(self, name: str, out: Tensor) -> PackedQ4 | None:
        """Writes the tensor to `out`, of just its shape; returns the integers behind it where they are kept."""

    def close(self) -> None:
        """StartupError if a tensor was left."""


@dataclass(frozen=True)
class WeightPlacement:
    """Where weights go, and in which form."""

    dtype: torch.dtype
    device: torch.device
    keep_packed: bool = False
    """Matrices keep the integers of Q4_0 and Q4_1 as well, on the CPU."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. H hidden, I intermediate, D head_dim, nq and nkv heads. Norm weights are fp32."""

    input_norm: Tensor
    """[H]."""
    qkv: Matrix
    """[(nq + 2 * nkv) * D, H]: query, key, value rows; heads rotate half-split (row i with row i + D / 2)."""
    qkv_bias: Tensor | None
    """[(nq + 2 * nkv) * D]."""
    q_norm: Tensor | None
    """[D], and so `k_norm`."""
    k_norm: Tensor | None
    o: Matrix
    """[H, nq * D]."""
    post_attention_norm: Tensor
    """[H]."""
    gate_up: Matrix
    """[2 * I, H]: gate rows, then up rows."""
    down: Matrix
    """[H, I]."""


@dataclass(frozen=True)
class ModelWeights:
    """V rows of vocabulary, padding included."""

    embedding: Tensor
    """[V, H]."""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[H], fp32."""
    lm_head: Matrix
    """[V, H]; `dense` is the embedding itself where the two are tied."""


def load_weights(
    files: ModelFiles, config: ModelConfig, placement: WeightPlacement, progress: Callable[[float], None]
) -> ModelWeights:
    """Loads all weights, one tensor after the other, rounded to `placement.dtype` (norms to fp32).

    `progress` is called with the share done, ending in 1. StartupError, naming file and tensor, for one that is
    missing, left over, misshapen, cut short, of a type that is not accepted, or too large for the dtype.
    """
    source: TensorSource
    if files.is_gguf:
        source = GgufSource(read_gguf_header(files.location), config, placement.keep_packed)
    else:
        source = SafetensorsSource(files.location, config)
    loader = _Loader(source, config, placement)
    embedding, lm_head = loader.embedding_and_head()
    layers = []
    for index in range(config.num_layers):
        progress((index + 1) / (config.num_layers + 2))
        layers.append(loader.layer(index))
    final_norm = loader.vector("model.norm.weight", config.hidden_size, torch.float32)
    source.close()
    progress(1.0)
    return ModelWeights(embedding, tuple(layers), final_norm, lm_head)


class _Loader:
    """Allocates in the asked dtype, has the source write into it, and moves it to the asked device: weights of a GPU
    pass through the CPU's memory one by one."""

    def __init__(self, source: TensorSource, config: ModelConfig, placement: WeightPlacement) -> None:
        self._source = source
        self._config = config
        self._dtype = placement.dtype
        self._device = placement.device

    def embedding_and_head(self) -> tuple[Tensor, Matrix]:
        vocab_size, hidden_size = self._config.vocab_size, self._config.hidden_size
        embedding = self.matrix({"model.embed_tokens.weight": vocab_size}, hidden_size)
        if self._config.tie_word_embeddings:
            return embedding.dense, embedding
        return embedding.dense, self.matrix({"lm_head.weight": vocab_size}, hidden_size)

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        hidden_size, head_dim = config.hidden_size, config.head_dim
        attention = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
        qkv = {f"{prefix}self_attn.{name}.weight": heads * head_dim for name, heads in attention.items()}
        gate_up = {f"{prefix}mlp.{name}.weight": config.intermediate_size for name in ("gate_proj", "up_proj")}
        bias = {name.replace("weight", "bias"): size for name, size in qkv.items()}
        return LayerWeights(
            input_norm=self.vector(f"{prefix}input_layernorm.weight", hidden_size, torch.float32),
            qkv=self.matrix(qkv, hidden_size),
            qkv_bias=self.vectors(bias, self._dtype) if config.qkv_bias else None,
            q_norm=self._head_norm(f"{prefix}self_attn.q_norm.weight"),
            k_norm=self._head_norm(f"{prefix}self_attn.k_norm.weight"),
            o=self.matrix({f"{prefix}self_attn.o_proj.weight": hidden_size}, config.num_heads * head_dim),
            post_attention_norm=self.vector(f"{prefix}post_attention_layernorm.weight", hidden_size, torch.float32),
            gate_up=self.matrix(gate_up, hidden_size),
            down=self.matrix({f"{prefix}mlp.down_proj.weight": hidden_size}, config.intermediate_size),
        )

    def matrix(self, rows_by_name: dict[str, int], columns: int) -> Matrix:
        """The named tensors' rows, one tensor below the other."""
        dense = torch.empty(sum(rows_by_name.values()), columns, dtype=self._dtype)
        views = torch.split(dense, list(rows_by_name.values()))
        parts = [self._fill(name, view) for name, view in zip(rows_by_name, views, strict=True)]
        return Matrix(dense.to(self._device), merge_packed(parts))

    def vectors(self, size_by_name: dict[str, int], dtype: torch.dtype) -> Tensor:
        """The named vectors, one after the other."""
        vector = torch.empty(sum(size_by_name.values()), dtype=dtype)
        for name, view in zip(size_by_name, torch.split(vector, list(size_by_name.values())), strict=True):
            self._fill(name, view)
        return vector.to(self._device)

    def vector(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        return self.vectors({name: size}, dtype)

    def _head_norm(self, name: str) -> Tensor | None:
        return self.vector(name, self._config.head_dim, torch.float32) if self._config.qk_norm else None

    def _fill(self, name: str, out: Tensor) -> PackedQ4 | None:
        packed = self._source.fill(name, out)
        if out.dtype == torch.float16 and not bool(torch.isfinite(out).all()):
            raise StartupError(f"tensor {quote(name)} is too large for float16 (accepted: --dtype float32 or bfloat16)")
        return packed
