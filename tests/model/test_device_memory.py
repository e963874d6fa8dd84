"""A GPU's memory: who gets how much, and what is said if it is too little."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from sapwood_kernels.partials import MAX_BYTES
from sapwood_server.config import ServerConfig
from sapwood_server.errors import StartupError
from sapwood_server.model.config_json import config_from_json
from sapwood_server.model.device_memory import (
    LIBRARY_BYTES,
    GpuMemory,
    StepSizes,
    check_gpu_memory,
    gpu_kv_memory,
    step_bytes,
)
from sapwood_server.model.load_plan import share_gpu_memory
from support.tiny_models import tiny_config

GIB = 2**30
CONFIG = config_from_json(tiny_config("llama", 300, 512), Path("config.json"))
"""Hidden 32, intermediate 64, 4 heads and 2 key-value heads of 8 dimensions."""
SIZES = StepSizes(num_tokens=100, num_sequences=10, max_model_len=500, split_size=64)


def test_bytes_of_a_step_by_hand() -> None:
    """Activations: the residual in fp32; x before and after a linear and its sum; qkv, queries, what each phase
    attended to and both joined; the MLP's two. Then logits, partials and tables."""
    per_token = 4 * 32 + 2 * (3 * 32 + (4 + 2 * 2) * 8 + 3 * 4 * 8 + 2 * 64 + 64)
    logits = 10 * 300 * (2 + 4 + 4 + 4 + 4) + 16 * 300 * 32
    partials = 10 * 8 * 4 * (8 + 2) * 4
    tables = 500 * 8 * 4 + 2 * 10 * 500
    assert step_bytes(CONFIG, torch.bfloat16, SIZES) == 110 * per_token + logits + partials + tables


def test_more_partials_than_kernels_take_are_refused() -> None:
    most = dataclasses.replace(SIZES, num_sequences=MAX_BYTES // (8 * 4 * (8 + 2) * 4))
    step_bytes(CONFIG, torch.bfloat16, most)
    with pytest.raises(StartupError, match=rf"accepted: up to {MAX_BYTES}; lower --max-num-seqs"):
        step_bytes(CONFIG, torch.bfloat16, dataclasses.replace(most, num_sequences=most.num_sequences + 1))


def test_pages_get_what_is_left_of_the_share() -> None:
    """90 % of 100 GiB, 2 of which somebody else holds, less 16 of weights, 1 of a step, and the libraries' part."""
    memory = GpuMemory(total=100 * GIB, free=98 * GIB)
    assert gpu_kv_memory(memory, 0.9, 16 * GIB, GIB) == 71 * GIB - LIBRARY_BYTES


def test_a_model_that_leaves_nothing_is_refused_with_both_numbers() -> None:
    memory = GpuMemory(total=20 * GIB, free=20 * GIB)
    with pytest.raises(StartupError) as raised:
        gpu_kv_memory(memory, 0.5, 16 * GIB, GIB)
    message = str(raised.value)
    for number in (16 * GIB, GIB + LIBRARY_BYTES, 10 * GIB, 20 * GIB):
        assert str(number) in message


def test_stated_pages_must_fit_beside_the_rest() -> None:
    memory = GpuMemory(total=24 * GIB, free=20 * GIB)
    check_gpu_memory(memory, 3 * GIB, 16 * GIB, GIB - LIBRARY_BYTES)
    with pytest.raises(StartupError, match=f"= {20 * GIB + 1} bytes, but {20 * GIB} bytes"):
        check_gpu_memory(memory, 3 * GIB + 1, 16 * GIB, GIB - LIBRARY_BYTES)


def test_the_flag_for_pages_overrides_the_share() -> None:
    memory = GpuMemory(total=4 * GIB, free=4 * GIB)
    stated = ServerConfig(kv_memory="1GiB", gpu_memory_utilization=0.05)
    weights, kv_memory = share_gpu_memory(stated, memory, CONFIG, torch.bfloat16, SIZES)
    assert kv_memory == GIB
    assert not weights.forms.blocked
    shared = ServerConfig(gpu_memory_utilization=0.5)
    _, kv_memory = share_gpu_memory(shared, memory, CONFIG, torch.bfloat16, SIZES)
    step = step_bytes(CONFIG, torch.bfloat16, SIZES)
    assert kv_memory == 2 * GIB - weights.num_bytes - step - LIBRARY_BYTES
