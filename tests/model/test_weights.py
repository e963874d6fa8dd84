"""Loading from both kinds of files: every value where it belongs, every tensor once, and clear words otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import read_gguf_header
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.matrix import Matrix
from sapwood_server.model.weights import ModelWeights, WeightPlacement, load_weights
from support import ggml_blocks
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import ARCHITECTURES, make_tiny_model

K_SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Rows whose lengths the K types' blocks of 256 divide."""
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def load(path: Path, dtype: torch.dtype = torch.float32, *, keep_packed: bool = False) -> ModelWeights:
    files = resolve_model(str(path))
    placement = WeightPlacement(dtype, torch.device("cpu"), keep_packed=keep_packed)
    return load_weights(files, load_model_config(files), placement, lambda fraction: None)


def check_equal(weights: ModelWeights, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Each field against the checkpoint's tensors, merged as the fields' docstrings say."""

    def below(prefix: str, names: tuple[str, ...], suffix: str = "weight") -> Tensor:
        return torch.cat([tensors[f"{prefix}{name}.{suffix}"] for name in names]).to(dtype)

    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].to(dtype))
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head.dense, head.to(dtype))
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"])
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        assert torch.equal(layer.qkv.dense, below(prefix, qkv))
        assert torch.equal(layer.gate_up.dense, below(prefix, ("mlp.gate_proj", "mlp.up_proj")))
        assert torch.equal(layer.o.dense, below(prefix, ("self_attn.o_proj",)))
        assert torch.equal(layer.down.dense, below(prefix, ("mlp.down_proj",)))
        assert torch.equal(layer.input_norm, tensors[prefix + "input_layernorm.weight"].float())
        assert torch.equal(layer.post_attention_norm, tensors[prefix + "post_attention_layernorm.weight"].float())
        if prefix + "self_attn.q_proj.bias" in tensors:
            assert layer.qkv_bias is not None
            assert torch.equal(layer.qkv_bias, below(prefix, qkv, "bias"))
        else:
            assert layer.qkv_bias is None
        for norm, name in ((layer.q_norm, "q_norm"), (layer.k_norm, "k_norm")):
            stored = tensors.get(f"{prefix}self_attn.{name}.weight")
            assert (norm is None) == (stored is None)
            assert norm is None or stored is None or torch.equal(norm, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_safetensors_of_each_architecture(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", architecture)
    check_equal(load(path, dtype), load_file(path / "model.safetensors"), dtype)


@pytest.mark.parametrize("quantisation", ggml_blocks.BLOCKS)
def test_the_numbers_of_a_block_are_those_of_ggmls_definition(quantisation: str, tmp_path: Path) -> None:
    """Not only those of the package that we read them with."""
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, "llama", quantisation, overrides=K_SIZES if quantisation.endswith("_K") else {})
    loaded = load(path).layers[1].o.dense
    place = next(tensor for tensor in read_gguf_header(path).tensors if tensor.name == "blk.1.attn_output.weight")
    columns = 256 if quantisation.endswith("_K") else 32
    num_bytes = loaded.numel() // columns * ggml_blocks.BLOCKS[quantisation][0]
    data = path.read_bytes()[place.offset : place.offset + num_bytes]
    expected = torch.tensor(ggml_blocks.numbers(data, quantisation), dtype=torch.float64).view(loaded.shape)
    assert expected.abs().max() > 0
    torch.testing.assert_close(loaded.double(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("quantisation", GGUF_TYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_of_each_architecture_and_type(architecture: str, quantisation: str, tmp_path: Path) -> None:
    overrides = K_SIZES if quantisation.endswith("_K") else {}
    tensors = make_tiny_gguf(tmp_path / "m.gguf", architecture, quantisation, overrides=overrides)
    weights = load(tmp_path / "m.gguf")
    check_equal(weights, tensors)
    assert weights.layers[0].qkv.packed is None
    check_equal(load(tmp_path / "m.gguf", torch.bfloat16), tensors, torch.bfloat16)


def unpacked(matrix: Matrix) -> Tensor:
    """The packed form by its formula, in fp32."""
    packed = matrix.packed
    assert packed is not None
    grouped = packed.quants.reshape(packed.quants.shape[0], -1, 32).float() * packed.scale[:, :, None]
    return (grouped + packed.minimum[:, :, None]).reshape(packed.quants.shape)


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1"])
def test_packed_integers_are_the_dense_values_exactly(quantisation: str, tmp_path: Path) -> None:
    tensors = make_tiny_gguf(tmp_path / "m.gguf", "llama", quantisation)
    weights = load(tmp_path / "m.gguf", keep_packed=True)
    check_equal(weights, tensors)
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down, weights.lm_head):
            assert matrix.packed is not None
            assert torch.equal(unpacked(matrix), matrix.dense)
            assert matrix.packed.quants.dtype == torch.uint8
            assert int(matrix.packed.quants.max()) <= 15


@pytest.mark.parametrize("quantisation", ["F16", "Q8_0", "Q5_0", "Q6_K"])
def test_types_without_a_packed_form_have_none(quantisation: str, tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf", "llama", quantisation, overrides=K_SIZES)
    layer = load(tmp_path / "m.gguf", keep_packed=True).layers[0]
    assert layer.qkv.packed is None


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_tied_head_shares_the_embeddings_storage(is_gguf: bool, tmp_path: Path) -> None:
    path = tmp_path / ("m.gguf" if is_gguf else "m")
    overrides = {"tie_word_embeddings": True}
    if is_gguf:
        make_tiny_gguf(path, "qwen2", "Q4_1", overrides=overrides)
    else:
        make_tiny_model(path, "qwen2", overrides=overrides)
    weights = load(path, keep_packed=True)
    assert weights.lm_head.dense.data_ptr() == weights.embedding.data_ptr()
    assert (weights.lm_head.packed is not None) == is_gguf


def test_the_stated_exceptions_are_passed_over(tmp_path: Path) -> None:
    """Rotary buffers of old checkpoints, and a head of its own beside a tied one (transformers ties it as well)."""
    path = make_tiny_model(tmp_path / "m", overrides={"tie_word_embeddings": True})
    tensors = load_file(path / "model.safetensors")
    more = {"lm_head.weight": torch.ones(320, 32), "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors | more, path / "model.safetensors")
    check_equal(load(path), tensors)


def test_progress_rises_to_one(tmp_path: Path) -> None:
    files = resolve_model(str(make_tiny_model(tmp_path / "m")))
    seen: list[float] = []
    load_weights(files, load_model_config(files), WeightPlacement(torch.float32, torch.device("cpu")), seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) >= 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_that_transformers_saved_in_shards(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = make_tiny_model(
        tmp_path / "source", architecture, overrides={"tie_word_embeddings": architecture == "qwen3"}
    )
    oracle = AutoModelForCausalLM.from_pretrained(source)
    target = make_tiny_model(tmp_path / "target", architecture)
    (target / "model.safetensors").unlink()
    oracle.save_pretrained(target, max_shard_size="20KB")
    assert len(list(target.glob("model-*.safetensors"))) > 2
    state: dict[str, Tensor] = oracle.state_dict()
    check_equal(load(target), state)


def edit_tensors(path: Path, edit: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "m: tensor 'model.norm.weight' is missing"),
        (
            lambda t: t.update({f"extra.{i}": torch.zeros(1) for i in range(5)}),
            "m: the model has no use for tensor 'extra.0', 'extra.1', 'extra.2' and 2 more",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(63, 32)}),
            "tensor 'model.layers.1.mlp.up_proj.weight' has shape [63, 32], expected [64, 32]",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(320, 32, dtype=torch.int8)}),
            "tensor 'lm_head.weight' is I8 (accepted: F32, F16, BF16)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)}),
            "no use for tensor 'model.layers.0.self_attn.o_proj.bias'",
        ),
    ],
)
def test_safetensors_that_do_not_fit(edit: Any, message: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    edit_tensors(path, edit)
    with pytest.raises(StartupError, match=re.escape(message)):
        load(path)


def test_a_safetensors_file_cut_short(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    whole = (path / "model.safetensors").read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        (path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(StartupError, match=r"model\.safetensors: not a whole safetensors file"):
            load(path)


def test_shards_that_do_not_agree_with_each_other(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:5]}, path / "a.safetensors")
    save_file({name: tensors[name] for name in names[4:]}, path / "b.safetensors")
    index = {"weight_map": {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match=re.escape(f"b.safetensors: tensor {names[4]!r} is also in a.safetensors")):
        load(path)


def test_values_too_large_for_float16(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    edit_tensors(path, lambda t: t["model.layers.1.mlp.down_proj.weight"].fill_(1e5))
    load(path, torch.bfloat16)
    with pytest.raises(StartupError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' is too large for float16"):
        load(path, torch.float16)


def test_a_gguf_cut_short_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, "llama", "Q4_0")
    whole = path.read_bytes()
    path.write_bytes(whole[:-2000])
    with pytest.raises(StartupError, match=r"m\.gguf: cut short: tensor '\S+' ends at byte \d+ of \d+"):
        load(path)


def test_a_gguf_of_another_type_names_tensor_and_type(tmp_path: Path) -> None:
    """The type code of one tensor is overwritten in the file: IQ4_NL (20) has Q4_0's size."""
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path, "llama", "Q4_0")
    whole = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    place = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[place] == 2
    for code, shown in ((20, "IQ4_NL"), (200, "of unknown type 200")):
        whole[place] = code
        path.write_bytes(whole)
        expected = f"tensor 'blk.1.ffn_up.weight' is {shown} (accepted: F32, F16, BF16, Q8_0, Q4_0"
        with pytest.raises(StartupError, match=re.escape(expected)):
            load(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"blk.1.ffn_norm.weight", b"blk.1.ffn_worm.weight", "tensor 'blk.1.ffn_norm.weight' is missing"),
        (b"blk.1.attn_q.weight", b"blk.7.attn_q.weight", "tensor 'blk.1.attn_q.weight' is missing"),
    ],
)
def test_a_gguf_with_a_tensor_under_another_name(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path)
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(StartupError, match=re.escape(message)):
        load(path)


def test_a_gguf_with_layers_left_over(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_tiny_gguf(path)
    files = resolve_model(str(path))
    config = load_model_config(files)
    fewer = type(config)(**{**vars(config), "num_layers": 1})
    with pytest.raises(StartupError, match=r"no use for tensor 'blk\.1\.\S+', 'blk\.1\.\S+', 'blk\.1\.\S+' and 6 more"):
        load_weights(files, fewer, WeightPlacement(torch.float32, torch.device("cpu")), lambda fraction: None)


def test_the_demo_models_matrices_are_all_packed() -> None:
    files = resolve_model("smollm2-135m")
    config = load_model_config(files)
    weights = load_weights(
        files, config, WeightPlacement(torch.bfloat16, torch.device("cpu"), keep_packed=True), lambda fraction: None
    )
    assert len(weights.layers) == config.num_layers == 30
    assert weights.lm_head.packed is None
    for layer in weights.layers:
        assert all(matrix.packed is not None for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down))
    first = weights.layers[0].down
    assert torch.equal(unpacked(first).bfloat16(), first.dense)
    assert read_gguf_header(files.location).metadata["general.architecture"] == config.architecture
