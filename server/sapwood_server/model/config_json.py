"""Hugging Face's config.json, of transformers 4 (`rope_scaling`, `rope_theta`) and 5 (`rope_parameters`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sapwood_server.errors import StartupError
from sapwood_server.model.config import Architecture, ModelConfig, RopeScaling
from sapwood_server.quoting import quote

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# What transformers takes for a key that config.json leaves out.
_DEFAULT_RMS_NORM_EPS = 1e-6
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_QWEN3_HEAD_DIM = 128
_DEFAULT_MISTRAL_WINDOW = 4096

_ONLY_ACCEPTED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}
"""Keys that change the computation, and the values that leave it as the decoder does it. An absent key is fine."""

T = TypeVar("T", int, float, bool)


@dataclass(frozen=True)
class _Object:
    """A JSON object of the file; reading quotes key, value and what is expected."""

    path: Path
    values: Mapping[str, Any]

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise StartupError(f"{self.path}: {quote(key)} is {quote(value)}; expected {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.get(key, kind, default)
        if value is None:
            raise StartupError(f"{self.path}: {quote(key)} is missing")
        return value


def config_from_json(values: Mapping[str, Any], path: Path) -> ModelConfig:
    """`values` is the object in `path`, the path is only named. Not yet checked for sizes that do not fit."""
    architecture = _architecture(values, path)
    for key, accepted in _ONLY_ACCEPTED.items():
        if key in values and values[key] not in accepted:
            shown = ", ".join(map(repr, accepted))
            raise StartupError(f"{path}: {quote(key)} is {quote(values[key])} (accepted: {shown})")
    config = _Object(path, values)
    hidden_size = config.require("hidden_size", int)
    num_heads = config.require("num_attention_heads", int)
    max_position_embeddings = config.require("max_position_embeddings", int)
    if num_heads <= 0:
        raise StartupError(f"{path}: 'num_attention_heads' is {quote(num_heads)}; expected a positive number")
    default_head_dim = _DEFAULT_QWEN3_HEAD_DIM if architecture == "qwen3" else hidden_size // num_heads
    rope = _Object(path, _rope_parameters(values, path))
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.require("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=config.require("intermediate_size", int),
        num_layers=config.require("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=config.require("num_key_value_heads", int, num_heads if architecture == "llama" else None),
        head_dim=config.require("head_dim", int, default_head_dim),
        rms_norm_eps=config.require("rms_norm_eps", float, _DEFAULT_RMS_NORM_EPS),
        rope_theta=rope.require("rope_theta", float, config.get("rope_theta", float, _DEFAULT_ROPE_THETA)),
        rope_scaling=_rope_scaling(rope, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=config.require("tie_word_embeddings", bool, False),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        sliding_window=_sliding_window(config, architecture),
    )


def _architecture(values: Mapping[str, Any], path: Path) -> Architecture:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(ARCHITECTURES):
        raise StartupError(f"{path}: 'architectures' is {quote(names)} (accepted: one of {', '.join(ARCHITECTURES)})")
    return ARCHITECTURES[names[0]]


def _rope_parameters(values: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The rotary settings of either layout, with the keys that may stand beside them brought in."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise StartupError(f"{path}: rope_parameters is {quote(rope)} (accepted: one flat object for all layers)")
    original = values.get("original_max_position_embeddings")
    return rope if original is None else rope | {"original_max_position_embeddings": original}


def _rope_scaling(rope: _Object, max_position_embeddings: int) -> RopeScaling | None:
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if rope.values.get("partial_rotary_factor") not in (None, 1.0):
        value = rope.values["partial_rotary_factor"]
        raise StartupError(f"{rope.path}: 'partial_rotary_factor' is {quote(value)} (accepted: 1.0)")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.require("factor", float))
    original = rope.require("original_max_position_embeddings", int, max_position_embeddings)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.require("factor", float),
            original_max_position_embeddings=original,
            low_freq_factor=rope.require("low_freq_factor", float),
            high_freq_factor=rope.require("high_freq_factor", float),
        )
    if kind == "yarn":
        factor = _yarn_factor(rope, max_position_embeddings / original if original > 0 else 1.0)
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=rope.require("beta_fast", float, 32.0),
            beta_slow=rope.require("beta_slow", float, 1.0),
            attention_factor=_yarn_attention_factor(rope, factor),
            truncate=rope.require("truncate", bool, True),
        )
    raise StartupError(f"{rope.path}: 'rope_type' is {quote(kind)} (accepted: {', '.join(ROPE_TYPES)})")


def _yarn_factor(rope: _Object, extension: float) -> float:
    """As stated; `null` stands for how many times longer than the original the context is (so transformers reads it).
    A file that leaves the key out is refused, as there."""
    if "factor" not in rope.values:
        raise StartupError(
            f"{rope.path}: 'factor' is missing (yarn needs it: a number, or null for max_position_embeddings over the "
            "original)"
        )
    return rope.require("factor", float, extension)


def _yarn_attention_factor(rope: _Object, factor: float) -> float:
    """As stated, else 0.1 ln(factor) + 1 (YaRN, equation 22), or DeepSeek's ratio of two such terms."""
    stated = rope.get("attention_factor", float)
    if stated is not None:
        return stated
    mscale, mscale_all_dim = rope.get("mscale", float), rope.get("mscale_all_dim", float)
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """`0.1 * weight * ln(factor) + 1`, and 1 without any extension."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _sliding_window(config: _Object, architecture: Architecture) -> int | None:
    """The window if any layer has one. Qwen's files state a window that is switched off; a Mistral without one says so
    (`null`), and has transformers' default if nothing is said."""
    if architecture == "llama" or (architecture != "mistral" and not config.get("use_sliding_window", bool)):
        return None
    if architecture == "mistral" and "sliding_window" not in config.values:
        return _DEFAULT_MISTRAL_WINDOW
    return config.get("sliding_window", int)
