"""What identifies the KV that a model computes: equal fingerprints may share stored pages."""

from __future__ import annotations

import hashlib
from dataclasses import asdict

import msgspec
import torch
from torch import Tensor

from sapwood_server.formats.model_files import ModelFiles
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.devices import DeviceKind
from sapwood_server.model.weights import ModelWeights

_LAYOUT_VERSION = 1
"""Raise when pages of the same model get other contents."""
_SAMPLED_ELEMENTS = 4096


def model_fingerprint(
    files: ModelFiles,
    config: ModelConfig,
    weights: ModelWeights,
    page_size: int,
    device: DeviceKind,
    *,
    deterministic: bool,
) -> str:
    """Hexadecimal hash of configuration, dtype, page layout, weight files' sizes and elements of every weight.

    Of the kind of device too: each computes with other ops, and lays its pages out in its own way. And of
    `deterministic`, whose ops are others again.
    """
    digest = hashlib.sha256()
    identity = {"config": asdict(config), "dtype": str(weights.embedding.dtype), "page_size": page_size}
    identity["deterministic"] = deterministic
    digest.update(
        msgspec.json.encode([f"{device.value}-{_LAYOUT_VERSION}", identity, _file_sizes(files)], order="sorted")
    )
    for tensor in _weights(weights):
        flat = tensor.flatten()
        stride = max(1, flat.numel() // _SAMPLED_ELEMENTS)
        digest.update(flat[::stride].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _file_sizes(files: ModelFiles) -> list[tuple[str, int]]:
    """Names and bytes of the files that hold weights, in order."""
    paths = [files.location] if files.is_gguf else sorted(files.location.glob("*.safetensors"))
    return [(path.name, path.stat().st_size) for path in paths]


def _weights(weights: ModelWeights) -> list[Tensor]:
    tensors = [weights.embedding, weights.final_norm, weights.lm_head.dense]
    for layer in weights.layers:
        tensors += [layer.qkv.dense, layer.o.dense, layer.gate_up.dense, layer.down.dense]
        tensors += [layer.input_norm, layer.post_attention_norm]
        tensors += [extra for extra in (layer.qkv_bias, layer.q_norm, layer.k_norm) if extra is not None]
    return tensors
