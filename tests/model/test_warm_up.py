"""The first calls, and a model that they show to be broken."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sapwood_server.errors import StartupError
from sapwood_server.model.load import load_runner
from sapwood_server.model.warm_up import warm_up
from support.stepping import Driver, make_config, make_runner
from support.tiny_models import make_tiny_model


def test_it_leaves_a_runner_as_good_as_new(tmp_path: Path) -> None:
    config = make_config(make_tiny_model(tmp_path / "model"))
    runner = make_runner(config)
    prompt = list(range(40))
    expected = Driver(runner).generate(prompt, 6, chunk=64)
    warm_up(runner)
    assert Driver(runner).generate(prompt, 6, chunk=64) == expected


def test_a_model_without_finite_logits_does_not_start(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match="damaged: the model's logits are not finite in float32; its weights are"):
        load_runner(make_config(folder), lambda stage, fraction: None)
