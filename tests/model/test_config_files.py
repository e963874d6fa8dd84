"""Both sources of a decoder's shape, and all that is refused because the decoder would compute something else."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.model.config import ModelConfig, RopeScaling
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.config_json import config_from_json
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import ARCHITECTURES, make_tiny_model, tiny_config

PATH = Path("config.json")
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}


def read(architecture: str = "llama", remove: tuple[str, ...] = (), **overrides: Any) -> ModelConfig:
    values = tiny_config(architecture, 320, 512) | overrides
    config = config_from_json({key: value for key, value in values.items() if key not in remove}, PATH)
    config.check(PATH)
    return config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_of_each_architecture(architecture: str, tmp_path: Path) -> None:
    config = load_model_config(resolve_model(str(make_tiny_model(tmp_path / "m", architecture))))
    assert config == ModelConfig(
        architecture=config.architecture,
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16 if architecture == "qwen3" else 8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        sliding_window=None,
    )
    assert config.architecture == architecture


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_says_the_same_as_the_folder(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", architecture)
    make_tiny_gguf(tmp_path / "m.gguf", architecture)
    from_folder = load_model_config(resolve_model(str(folder)))
    from_gguf = load_model_config(resolve_model(str(tmp_path / "m.gguf")))
    assert from_gguf.rms_norm_eps == pytest.approx(from_folder.rms_norm_eps)  # fp32 in the file
    assert vars(from_gguf) | {"rms_norm_eps": 0} == vars(from_folder) | {"rms_norm_eps": 0}


def test_both_layouts_of_rotary_settings() -> None:
    old = read(remove=("rope_parameters",), rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4})
    new = read(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    assert read(remove=("rope_parameters",)).rope_theta == 10_000.0
    assert read(remove=("rope_parameters",), rope_scaling=None, rope_theta=77).rope_theta == 77.0


def test_llama3_scaling() -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    scaling = read(remove=("rope_parameters",), rope_scaling=rope, rope_theta=5e5).rope_scaling
    assert scaling == RopeScaling(
        kind="llama3",
        factor=32.0,
        original_max_position_embeddings=128,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


@pytest.mark.parametrize(
    ("more", "factor", "attention_factor"),
    [
        ({"factor": 4.0}, 4.0, 0.1 * math.log(4) + 1),
        ({"factor": 4.0, "attention_factor": 1.5}, 4.0, 1.5),
        (
            {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1},
            40.0,
            (0.07 * math.log(40) + 1) / (0.11 * math.log(40) + 1),
        ),
        ({"factor": None}, 8.0, 0.1 * math.log(8) + 1),
        ({"factor": 1.0}, 1.0, 1.0),
    ],
)
def test_yarn_scaling(more: dict[str, float], factor: float, attention_factor: float) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 64, "beta_fast": 16.0}
    scaling = read("qwen3", rope_parameters=rope | more).rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", factor, 64)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (16.0, 1.0, True)
    assert scaling.attention_factor == pytest.approx(attention_factor)


def test_the_original_context_may_stand_beside_or_be_left_out() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0}
    beside = read(rope_parameters=rope, original_max_position_embeddings=256).rope_scaling
    assert beside is not None
    assert beside.original_max_position_embeddings == 256
    left_out = read(rope_parameters=rope).rope_scaling
    assert left_out is not None
    assert left_out.original_max_position_embeddings == 512


def test_keys_that_old_files_leave_out() -> None:
    missing = ("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "hidden_act")
    config = read(remove=missing)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.tie_word_embeddings) == (
        4,
        8,
        1e-6,
        False,
    )
    assert read("qwen3", remove=("head_dim",)).head_dim == 128


@pytest.mark.parametrize(
    ("architecture", "overrides", "expected"),
    [
        ("mistral", {"sliding_window": 128}, 128),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 128}, None),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": True}, 128),
        ("llama", {"sliding_window": 128}, None),
    ],
)
def test_sliding_windows(architecture: str, overrides: dict[str, Any], expected: int | None) -> None:
    config = read(architecture, **overrides)
    assert config.sliding_window == expected
    config.check_context(128)
    if expected is None:
        config.check_context(129)
    else:
        with pytest.raises(
            StartupError, match=r"sliding_window is 128, but --max-model-len is 129 \(accepted: at most"
        ):
            config.check_context(129)


def test_a_mistral_that_says_nothing_of_a_window_has_transformers_own() -> None:
    stated = read("mistral", remove=("sliding_window",)).sliding_window
    assert stated == MistralConfig().sliding_window


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'architectures' is ['GemmaForCausalLM'] (accepted: one of Llama"),
        ({"architectures": None}, "'architectures' is None"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu' (accepted: 'silu')"),
        ({"attention_bias": True}, "'attention_bias' is True (accepted: False)"),
        ({"mlp_bias": True}, "'mlp_bias' is True (accepted: False)"),
        ({"quantization_config": {"quant_method": "awq"}}, "'quantization_config' is {'quant_method': 'awq'}"),
        ({"num_experts": 8}, "'num_experts' is 8"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "'partial_rotary_factor' is 0.5"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "'rope_type' is 'longrope' (accepted: default, linear, llama3",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one flat object for all layers"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "big"}, "'hidden_size' is 'big'; expected int"),
        ({"hidden_size": True}, "'hidden_size' is True; expected int"),
        ({"num_hidden_layers": 0}, "num_layers is 0; expected a positive number"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0; expected a positive number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; expected a positive number"),
        ({"max_position_embeddings": 1}, "max_position_embeddings is 1; expected at least 2"),
        ({"num_key_value_heads": 3}, "4 heads can't share 3 key-value heads evenly"),
        ({"head_dim": 7}, "head_dim is 7; expected an even number"),
        ({"architectures": [["LlamaForCausalLM"]]}, "'architectures' is [['LlamaForCausalLM']]"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan; expected a positive number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; expected a positive number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0.0; expected a positive number"),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 256}},
            "'factor' is missing (yarn needs it: a number, or null for max_position_embeddings over the original)",
        ),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0, "factor": None}},
            "original_max_position_embeddings is 0; expected a positive number",
        ),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0; expected a positive number",
        ),
        ({"rope_parameters": YARN | {"beta_fast": 1.0}}, "beta_slow is 1.0; expected less than beta_fast, 1.0"),
        ({"rope_parameters": YARN | {"beta_slow": 0.0}}, "beta_slow is 0.0; expected a positive number"),
        ({"rope_parameters": YARN | {"attention_factor": -1.0}}, "attention_factor is -1.0; expected a positive"),
        ({"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta is 1.0; expected more than 1 for yarn"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "low_freq_factor is 4.0; expected less than high_freq_factor, 4.0",
        ),
    ],
)
def test_refusals_quote_key_and_value(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=re.escape(message)) as caught:
        read(**overrides)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, RopeScaling(kind="linear", factor=4.0)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.attn_factor": 2.0,
            },
            RopeScaling(
                kind="yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                beta_fast=32.0,
                beta_slow=1.0,
                attention_factor=2.0 * (0.1 * math.log(4) + 1),
            ),
        ),
        ({"rope.scaling.type": "none"}, None),
        ({"attention.sliding_window": 64}, None),
    ],
)
def test_gguf_scaling(metadata: dict[str, Any], expected: RopeScaling | None, tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    config = load_model_config(resolve_model(str(tmp_path / "m.gguf")))
    assert config.rope_scaling == expected
    assert config.sliding_window == metadata.get("attention.sliding_window")


def test_gguf_rotary_factors_are_read_from_their_tensor(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", rope_factors=(1.0, 2.5, 8.0, 32.0))
    config = load_model_config(resolve_model(str(tmp_path / "m.gguf")))
    assert config.rope_scaling == RopeScaling(kind="factors", factors=(1.0, 2.5, 8.0, 32.0))
    make_tiny_gguf(tmp_path / "m.gguf", rope_factors=(1.0, 2.5))
    with pytest.raises(StartupError, match="2 rotary factors for a head_dim of 8"):
        load_model_config(resolve_model(str(tmp_path / "m.gguf")))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope' (accepted: none, linear, yarn)"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"rope.scaling.type": "linear"}, "metadata key 'llama.rope.scaling.factor' is missing"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": "x"}, "is 'x'; expected float"),
        ({"expert_count": 8}, "llama.expert_count is 8 (accepted: 0)"),
    ],
)
def test_gguf_refusals_name_key_and_value(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(StartupError, match=re.escape(message)):
        load_model_config(resolve_model(str(tmp_path / "m.gguf")))


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", "mistral")
    expected = "general.architecture is 'mistral' (accepted: llama, qwen2, qwen3)"
    with pytest.raises(StartupError, match=re.escape(expected)):
        load_model_config(resolve_model(str(tmp_path / "m.gguf")))


@pytest.mark.parametrize("key", ["rope.dimension_count", "attention.value_length"])
def test_gguf_heads_of_several_sizes(key: str, tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", metadata={key: 4}, overrides={"head_dim": 8})
    expected = f"llama.{key} is 4 (accepted: the head dimension, 8)"
    with pytest.raises(StartupError, match=re.escape(expected)):
        load_model_config(resolve_model(str(tmp_path / "m.gguf")))


def test_the_folders_config_is_what_transformers_reads(tmp_path: Path) -> None:
    """The helper's layout is transformers' own: what it saves again, we read the same."""
    path = make_tiny_model(tmp_path / "m", "qwen3", overrides={"tie_word_embeddings": True})
    before = load_model_config(resolve_model(str(path)))
    from transformers import AutoConfig

    AutoConfig.from_pretrained(path).save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    after = config_from_json(saved | {"architectures": saved.get("architectures", ["Qwen3ForCausalLM"])}, PATH)
    assert after == before
