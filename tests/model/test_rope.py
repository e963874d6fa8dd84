"""Rotary tables against transformers' own, for every kind of scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sapwood_server.model.config import ModelConfig, RopeScaling
from sapwood_server.model.config_json import config_from_json
from sapwood_server.model.rope import rotary_bytes, rotary_frequencies, rotary_table, rotation_matrices
from support.tiny_models import tiny_config

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 2048,
    },
    {"rope_type": "yarn", "factor": 16.0, "truncate": False, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.9, "original_max_position_embeddings": 4096},
]


def both_configs(scaling: dict[str, Any], head_dim: int, theta: float) -> tuple[ModelConfig, LlamaConfig]:
    document = tiny_config("llama", vocab_size=300, max_position_embeddings=131072)
    document |= {"head_dim": head_dim, "rope_parameters": scaling | {"rope_theta": theta}}
    return config_from_json(document, Path("config.json")), LlamaConfig(**document)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling.values())))
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (128, 500000.0), (24, 1e6)])
def test_the_table_is_transformers(scaling: dict[str, Any], head_dim: int, theta: float) -> None:
    config, oracle = both_configs(scaling, head_dim, theta)
    positions = torch.tensor([[0, 1, 2, 100, 4095, 8191]])
    cos, sin = LlamaRotaryEmbedding(oracle)(torch.zeros(1), positions)
    wanted = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    found = rotary_table(config, 8192)[positions[0]]
    # A frequency's last bit, times the position: 8191 * 2 ** -24 is 5e-4 radians for the fastest pair.
    assert float((found - wanted).abs().max()) < 1e-3
    assert float((found[:4] - wanted[:4]).abs().max()) < 2e-5


def test_stated_factors_divide_frequencies() -> None:
    config, _ = both_configs({"rope_type": "default"}, 8, 10000.0)
    plain = rotary_frequencies(config)
    factors = RopeScaling(kind="factors", factors=(1.0, 2.0, 4.0, 8.0))
    scaled = rotary_frequencies(ModelConfig(**{**vars(config), "rope_scaling": factors}))
    assert torch.equal(scaled, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))


def test_a_scaling_without_its_fields_is_refused() -> None:
    config, _ = both_configs({"rope_type": "default"}, 8, 10000.0)
    broken = ModelConfig(**{**vars(config), "rope_scaling": RopeScaling(kind="llama3", factor=2.0)})
    with pytest.raises(ValueError, match="'llama3' has no 'low_freq_factor'"):
        rotary_frequencies(broken)


def test_matrices_rotate_as_cosines_and_sines_do() -> None:
    cos_sin = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    wanted = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    found = torch.einsum("td,tde->te", x, rotation_matrices(cos_sin))
    assert torch.allclose(found, wanted, atol=1e-6)


def test_the_memory_of_a_table() -> None:
    config = config_from_json(tiny_config("qwen3", 300, 512), Path("config.json"))
    assert rotary_bytes(config, 100) == rotary_table(config, 100).nbytes
