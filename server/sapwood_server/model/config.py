"""The shape of a decoder: what the weights must look like and how a forward pass uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from sapwood_server.errors import StartupError
from sapwood_server.quoting import quote

_NUMBER_LIMIT = 2**53
"""Far above any model's; up to here Python's floats hold integers exactly."""

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

    def check(self, path: Path, head_dim: int, rope_theta: float) -> None:
        """StartupError that names `path`, key and value if the frequencies can't be computed from this."""
        for name, value in (*_numbers(self), *(("a rotary factor", factor) for factor in self.factors or ())):
            _check_positive(path, name, value)
        if self.factors is not None and len(self.factors) != head_dim // 2:
            raise StartupError(f"{path}: {len(self.factors)} rotary factors for a head_dim of {head_dim}")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            bounds = getattr(self, low), getattr(self, high)
            if None not in bounds and bounds[0] >= bounds[1]:
                given, limit = map(quote, bounds)
                raise StartupError(f"{path}: {low} is {given}; expected less than {high}, {limit}")
        if self.kind == "yarn" and rope_theta <= 1:
            raise StartupError(f"{path}: rope_theta is {rope_theta}; expected more than 1 for yarn")


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
        for name, value in _numbers(self):
            _check_positive(path, name, value)
        if self.num_heads % self.num_kv_heads:
            heads, kv_heads = quote(self.num_heads), quote(self.num_kv_heads)
            raise StartupError(f"{path}: {heads} heads can't share {kv_heads} key-value heads evenly")
        if self.max_position_embeddings < 2:
            raise StartupError(
                f"{path}: max_position_embeddings is {self.max_position_embeddings}; expected at least 2, for a token "
                "of a prompt and its answer"
            )
        if self.head_dim % 2:
            raise StartupError(f"{path}: head_dim is {quote(self.head_dim)}; expected an even number")
        if self.rope_scaling is not None:
            self.rope_scaling.check(path, self.head_dim, self.rope_theta)

    def check_context(self, max_model_len: int) -> None:
        """StartupError if a sliding window would ever hide a token: windowed attention is not implemented."""
        if self.sliding_window is not None and max_model_len > self.sliding_window:
            raise StartupError(
                f"the model's sliding_window is {self.sliding_window}, but --max-model-len is {max_model_len} "
                f"(accepted: at most {self.sliding_window}; windowed attention is not implemented)"
            )


def _numbers(shape: RopeScaling | ModelConfig) -> Iterator[tuple[str, int | float]]:
    """Names and values of the fields that are numbers."""
    for field in fields(shape):
        value = getattr(shape, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield field.name, value


def _check_positive(path: Path, name: str, value: int | float) -> None:
    if not 0 < value < _NUMBER_LIMIT:
        raise StartupError(f"{path}: {name} is {quote(value)}; expected a positive number under 2**53")
