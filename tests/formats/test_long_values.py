"""A file may hold anything: what is said of it is one short line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import GgufHeader, GgufTensor, Value
from sapwood_server.formats.gguf_tokenizer import read_vocabulary
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.tokenizer import load_tokenizer
from sapwood_server.formats.vocabulary import load_vocabulary
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.config_gguf import config_from_gguf
from sapwood_server.model.safetensors_source import SafetensorsSource
from support.tiny_models import make_tiny_model

LONG = "x" * 100_000
LONGEST = 1300
"""Characters: some values of `QUOTE_CHARACTERS`, or a reason of another library, and the words around them."""


def said(refuse: Callable[[], object]) -> str:
    with pytest.raises(StartupError) as caught:
        refuse()
    message = str(caught.value)
    assert len(message) < LONGEST
    assert "\n" not in message
    return message


def header(**metadata: Value) -> GgufHeader:
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    embedding = GgufTensor("token_embd.weight", (4, 4), 0, 0)
    return GgufHeader(Path("m.gguf"), 1000, keys, (embedding,))


@pytest.mark.parametrize("value", [[7] * 10**6, [LONG] * 10, LONG], ids=["numbers", "strings", "string"])
def test_a_gguf_array_where_a_number_is_wanted(value: Value) -> None:
    assert "llama.block_count" in said(lambda: header(llama__block_count=value).get("llama.block_count", int))


@pytest.mark.parametrize(
    "metadata",
    [
        {"general__architecture": LONG},
        {"general__architecture": "llama", "llama__attention__head_count": LONG},
        {
            "general__architecture": "llama",
            "llama__attention__head_count": 1,
            "llama__embedding_length": 4,
            "llama__feed_forward_length": 4,
            "llama__block_count": 1,
            "llama__attention__layer_norm_rms_epsilon": 1e-5,
            "llama__rope__scaling__" + LONG: [LONG],
        },
    ],
    ids=["architecture", "number", "key"],
)
def test_hyperparameters_of_a_gguf(metadata: dict[str, Value]) -> None:
    said(lambda: config_from_gguf(header(**metadata)))


@pytest.mark.parametrize(
    "metadata",
    [
        {"model": LONG},
        {"model": "gpt2", "tokens": ["a"], "pre": LONG},
        {"model": "gpt2", "tokens": ["a"], "pre": "gpt-2", "merges": [LONG]},
        {"model": "gpt2", "tokens": ["a"], "pre": "gpt-2", "merges": [f"{LONG} a"]},
    ],
    ids=["model", "pre", "merge", "merge of no tokens"],
)
def test_vocabulary_of_a_gguf(metadata: dict[str, Value]) -> None:
    said(lambda: read_vocabulary(header(**{f"tokenizer__ggml__{key}": value for key, value in metadata.items()})))


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "m")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": [LONG]},
        {"hidden_size": LONG},
        {"hidden_size": [LONG]},
        {"hidden_act": LONG},
        {"num_attention_heads": -(10**4000)},
        {"num_hidden_layers": -(10**4000)},
        {"num_key_value_heads": 10**4000 + 1},
        {"head_dim": 10**4000 + 1},
        {"rms_norm_eps": -(10**300)},
        {"quantization_config": {LONG: LONG}},
        {"rope_parameters": {"rope_type": LONG}},
        {"rope_parameters": {"full_attention": {LONG: LONG}}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": LONG}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_config_json(folder: Path, values: dict[str, Any]) -> None:
    change(folder / "config.json", **values)
    said(lambda: load_model_config(resolve_model(str(folder))))


@pytest.mark.parametrize("values", [{"vocab_size": LONG}, {"vocab_size": 10**4000}, {"eos_token_id": [LONG]}], ids=str)
def test_vocabulary_of_a_folder(folder: Path, values: dict[str, Any]) -> None:
    change(folder / "config.json", **values)
    said(lambda: load_vocabulary(resolve_model(str(folder))))


def test_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": LONG}, LONG: LONG}))
    said(lambda: load_tokenizer(resolve_model(str(folder))))


@pytest.mark.parametrize("weight_map", [{LONG: 1}, {LONG: f"../{LONG}"}, {"a": LONG}], ids=["kind", "folder", "length"])
def test_the_index_of_shards(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    said(lambda: resolve_model(str(folder)))


def test_a_header_of_safetensors(folder: Path) -> None:
    config = load_model_config(resolve_model(str(folder)))
    header = json.dumps({LONG: {"dtype": LONG, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    said(lambda: SafetensorsSource(folder, config))


def test_a_model_of_a_long_name() -> None:
    said(lambda: resolve_model(LONG))
    said(lambda: resolve_model(f"a/{LONG}"))
