"""The same settings from a GGUF's metadata, under llama.cpp's key names."""

from __future__ import annotations

import numpy as np

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import GgufHeader, GgufTensor
from sapwood_server.model.config import Architecture, ModelConfig, RopeScaling
from sapwood_server.model.config_json import yarn_mscale
from sapwood_server.quoting import quote, shorten

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("none", "linear", "yarn")
ROPE_FACTORS_TENSOR = "rope_freqs.weight"

_ROPE_SCALING_KEYS = {
    "yarn": {
        "type",
        "factor",
        "original_context_length",
        "attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "finetuned",
    },
    "linear": {"type", "factor", "original_context_length", "finetuned"},
    "none": {"type", "factor", "original_context_length", "finetuned"},
}
_F32 = 0


def config_from_gguf(header: GgufHeader) -> ModelConfig:
    """Not yet checked for sizes that do not fit. A tied head is one whose file has no `output.weight`."""
    name = header.require("general.architecture", str)
    architecture = next((known for known in ARCHITECTURES if known == name), None)
    if architecture is None:
        accepted = ", ".join(ARCHITECTURES)
        raise StartupError(f"{header.path}: general.architecture is {quote(name)} (accepted: {accepted})")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if "token_embd.weight" not in tensors:
        raise StartupError(f"{header.path}: no tensor 'token_embd.weight'")
    if header.get(f"{name}.expert_count", int):
        raise StartupError(
            f"{header.path}: {name}.expert_count is {header.get(f'{name}.expert_count', int)} (accepted: 0)"
        )
    num_heads = header.require(f"{name}.attention.head_count", int)
    return ModelConfig(
        architecture=architecture,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=header.require(f"{name}.embedding_length", int),
        intermediate_size=header.require(f"{name}.feed_forward_length", int),
        num_layers=header.require(f"{name}.block_count", int),
        num_heads=num_heads,
        num_kv_heads=header.get(f"{name}.attention.head_count_kv", int) or num_heads,
        head_dim=_head_dim(header, name, num_heads),
        rms_norm_eps=header.require(f"{name}.attention.layer_norm_rms_epsilon", float),
        rope_theta=header.get(f"{name}.rope.freq_base", float) or 10_000.0,
        rope_scaling=_rope_scaling(header, name, tensors.get(ROPE_FACTORS_TENSOR)),
        max_position_embeddings=header.require(f"{name}.context_length", int),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        sliding_window=header.get(f"{name}.attention.sliding_window", int),
    )


def _head_dim(header: GgufHeader, name: str, num_heads: int) -> int:
    """Key, value and rotary dimensions must be one and the same."""
    if num_heads <= 0:
        raise StartupError(f"{header.path}: {name}.attention.head_count is {num_heads}; expected a positive number")
    stated = header.get(f"{name}.attention.key_length", int)
    head_dim = stated or header.require(f"{name}.embedding_length", int) // num_heads
    for key in ("attention.value_length", "rope.dimension_count"):
        value = header.get(f"{name}.{key}", int)
        if value is not None and value != head_dim:
            raise StartupError(f"{header.path}: {name}.{key} is {value} (accepted: the head dimension, {head_dim})")
    return head_dim


def _rope_scaling(header: GgufHeader, name: str, factors: GgufTensor | None) -> RopeScaling | None:
    prefix = f"{name}.rope.scaling."
    kind = header.get(prefix + "type", str) or "none"
    if kind not in ROPE_TYPES:
        raise StartupError(f"{header.path}: {prefix}type is {quote(kind)} (accepted: {', '.join(ROPE_TYPES)})")
    for key in header.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _ROPE_SCALING_KEYS[kind]:
            given = f"{shorten(key)} is {quote(header.metadata[key])}"
            raise StartupError(f"{header.path}: {given}; not implemented for {quote(kind)} scaling")
    if factors is not None:
        if kind != "none":
            raise StartupError(f"{header.path}: both {ROPE_FACTORS_TENSOR} and {prefix}type {quote(kind)}")
        return RopeScaling(kind="factors", factors=_read_factors(header, factors))
    if kind == "linear":
        return RopeScaling(kind="linear", factor=header.require(prefix + "factor", float))
    if kind == "yarn":
        factor = header.require(prefix + "factor", float)
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=header.require(prefix + "original_context_length", int),
            beta_fast=header.get(prefix + "yarn_beta_fast", float) or 32.0,
            beta_slow=header.get(prefix + "yarn_beta_slow", float) or 1.0,
            attention_factor=yarn_mscale(factor) * (header.get(prefix + "attn_factor", float) or 1.0),
        )
    return None


def _read_factors(header: GgufHeader, tensor: GgufTensor) -> tuple[float, ...]:
    """The divisors of the frequencies: a small fp32 vector."""
    end = tensor.offset + 4 * tensor.shape[0]
    if tensor.type_code != _F32 or len(tensor.shape) != 1 or end > header.file_size:
        raise StartupError(f"{header.path}: tensor {quote(tensor.name)} is not a whole F32 vector")
    values = np.fromfile(header.path, dtype="<f4", count=tensor.shape[0], offset=tensor.offset)
    return tuple(float(value) for value in values)
