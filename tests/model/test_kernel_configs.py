"""The kernels' tile sizes for a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from sapwood_kernels.config_table import ConfigKey, attention_config
from sapwood_kernels.values import AttentionPhase
from sapwood_server.errors import StartupError
from sapwood_server.model.config_json import config_from_json
from sapwood_server.model.devices import DeviceChoice, DeviceKind
from sapwood_server.model.kernel_configs import find_kernel_configs
from support.tiny_models import tiny_config

CONFIG = config_from_json(tiny_config("llama", 300, 512) | {"head_dim": 128}, Path("config.json"))
HOPPER = DeviceChoice(kind=DeviceKind.CUDA, detail="H200", reason="", capability=(9, 0))


def test_they_are_the_tables_for_the_models_heads_and_the_devices_capability() -> None:
    found = find_kernel_configs(CONFIG, torch.bfloat16, HOPPER)
    for phase, config in ((AttentionPhase.PREFILL, found.prefill), (AttentionPhase.DECODE, found.decode)):
        key = ConfigKey(arch=90, head_dim=128, group=2, dtype=torch.bfloat16, phase=phase)
        assert config == attention_config(key)
    assert found.decode.split_size > 0


def test_heads_that_no_kernel_was_made_for_are_refused() -> None:
    odd = dataclasses.replace(CONFIG, head_dim=72)
    with pytest.raises(StartupError, match=r"can't run on --device cuda: .*head_dim 72"):
        find_kernel_configs(odd, torch.bfloat16, HOPPER)
