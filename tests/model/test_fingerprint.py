"""Fingerprints: equal for the same model loaded twice, different for whatever changes KV."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from support.stepping import make_config, make_runner
from support.tiny_models import make_tiny_model


def fingerprint(folder: Path, dtype: str = "float32", page_size: int = 16, *, deterministic: bool = False) -> str:
    config = make_config(folder, dtype=dtype, page_size=page_size, deterministic=deterministic)
    return make_runner(config).info.fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("fingerprint") / "model", "qwen3")


def test_the_same_model_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    assert fingerprint(folder) == fingerprint(folder)
    assert fingerprint(make_tiny_model(tmp_path / "elsewhere", "qwen3")) == fingerprint(folder)


def test_dtype_and_page_size_are_part_of_it(folder: Path) -> None:
    assert len({fingerprint(folder), fingerprint(folder, "bfloat16"), fingerprint(folder, page_size=32)}) == 3


def test_so_is_whether_rows_have_the_same_bits_in_every_batch(folder: Path) -> None:
    assert fingerprint(folder, deterministic=True) == fingerprint(folder, deterministic=True)
    assert fingerprint(folder, deterministic=True) != fingerprint(folder)


def test_so_is_the_configuration(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", "qwen3", overrides={"rms_norm_eps": 1e-6})
    assert fingerprint(other) != fingerprint(folder)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_so_are_the_weights(folder: Path, tmp_path: Path, name: str) -> None:
    other = make_tiny_model(tmp_path / "other", "qwen3")
    tensors = load_file(other / "model.safetensors")
    tensors[name].mul_(1.5)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(other) != fingerprint(folder)
