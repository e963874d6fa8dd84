"""The shape of a decoder: what the weights must look like and how a forward pass uses them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from sapwood_server.errors import StartupError

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a model's rotary frequencies differ from `theta ** (-2i / head_dim)`. Fields not of its kind are None.

    `linear`: frequencies are divided by `factor`. `llama3`: low ones by `factor`, those between the two bounds blended
    (Llama 3.1). `yarn`: Peng et al., 2023; also scales cos and sin by `attention_factor`. `factors`: the i-th frequency
    is divided by `factors[i]` (GGUF's `rope_freqs.weight`, in which llama.cpp stores the llama3 kind).
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    """llama3, yarn: the context the model was trained on before scaling, in tokens."""
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    """yarn: dimensions that turn more often than this over the original context keep their frequency."""
    beta_slow: float | None = None
    """yarn: dimensions that turn less often than this have it divided by `factor`."""
    attention_factor: float | None = None
    """yarn: what cos and sin are multiplied by; always set for yarn."""
    truncate: bool = True
    """yarn: round the bounds of the blended dimensions outwards to whole dimensions."""
    factors: tuple[float, ...] | None = None
    """factors: one per pair of dimensions, `head_dim / 2` in all."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-like decoder: RMS norm, rotary positions (half-split), grouped-query attention, gated SiLU MLP."""

    architecture: Architecture
    vocab_size: int
    """Rows of the embedding, padding included."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    """The model's own context, in tokens."""
    tie_word_embeddings: bool
    """Whether the language-model head is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    """Whether each query and key head is RMS-normed before the rotation (Qwen3)."""
    sliding_window: int | None
    """In some layer a token attends to this many tokens only, itself included. See `check_context`."""

    def check(self, path: Path) -> None:
        """StartupError that names `path`, key and value if the sizes make no decoder."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise StartupError(f"{path}: {field.name} is {value}; expected a positive number")
        if self.num_heads % self.num_kv_heads:
            raise StartupError(f"{path}: {self.num_heads} heads can't share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise StartupError(f"{path}: head_dim is {self.head_dim}; expected an even number")
        factors = self.rope_scaling.factors if self.rope_scaling else None
        if factors is not None and len(factors) != self.head_dim // 2:
            raise StartupError(f"{path}: {len(factors)} rotary factors for a head_dim of {self.head_dim}")

    def check_context(self, max_model_len: int) -> None:
        """StartupError if a sliding window would ever hide a token: windowed attention is not implemented."""
        if self.sliding_window is not None and max_model_len > self.sliding_window:
            raise StartupError(
                f"the model's sliding_window is {self.sliding_window}, but --max-model-len is {max_model_len} "
                f"(accepted: at most {self.sliding_window}; windowed attention is not implemented)"
            )
