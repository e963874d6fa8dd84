"""Who gets how much memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from sapwood_server.errors import StartupError
from sapwood_server.model.config_json import config_from_json
from sapwood_server.model.memory import (
    CPU_KV_LIMIT,
    available_memory,
    default_kv_memory,
    give_back_freed_memory,
    kv_bytes_per_token,
    plan_kv,
)
from support.tiny_models import tiny_config

GIB = 2**30
CONFIG = config_from_json(tiny_config("qwen3", 300, 512), Path("config.json"))
"""2 layers, 2 key-value heads of 16 dimensions."""


def test_bytes_of_a_token() -> None:
    assert kv_bytes_per_token(CONFIG, torch.float32) == 4 * 2 * 2 * 2 * 16
    assert kv_bytes_per_token(CONFIG, torch.bfloat16) == 2 * 2 * 2 * 2 * 16


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_pages_fill_the_memory(page_size: int) -> None:
    plan = plan_kv(CONFIG, torch.bfloat16, page_size, 512, 10**6)
    page_bytes = page_size * plan.bytes_per_token
    assert plan.num_bytes <= 10**6 < plan.num_bytes + page_bytes
    assert plan.num_pages * page_bytes == plan.num_bytes
    assert plan.dense_bytes == plan.num_bytes // 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_loading_freed_goes_back_to_the_system() -> None:
    """Blocks of 1 MiB, some of which stay, as linears do among the weights they are made of."""
    large = np.ones(8 * 2**20, dtype=np.uint8)
    del large  # a freed block of 8 MiB has malloc keep smaller ones from now on
    blocks = [np.ones(2**20, dtype=np.uint8) for _ in range(200)]
    kept = blocks[::10]
    blocks.clear()
    before = resident_bytes()
    if not give_back_freed_memory():
        pytest.skip("this C library has no malloc_trim")
    assert len(kept) == 20
    assert before - resident_bytes() > 100 * 2**20


def test_more_slots_than_an_index_holds_are_not_planned_nor_their_copies() -> None:
    plan = plan_kv(CONFIG, torch.bfloat16, 16, 512, 2**50)
    assert plan.num_pages * plan.page_size == 2**31
    assert plan.dense_bytes == plan.num_bytes // 2


def test_one_sequence_and_the_reserved_page_just_fit() -> None:
    needed = (512 + 16) * kv_bytes_per_token(CONFIG, torch.bfloat16)
    assert plan_kv(CONFIG, torch.bfloat16, 16, 512, needed).num_pages == 33
    with pytest.raises(StartupError) as raised:
        plan_kv(CONFIG, torch.bfloat16, 16, 512, needed - 1)
    message = str(raised.value)
    assert f"KV memory is {needed - 1} bytes, but one sequence of 512 tokens needs {needed} bytes" in message
    assert "--kv-memory" in message
    assert "\n" not in message


def test_the_default_is_a_share_of_what_weights_leave() -> None:
    assert default_kv_memory(5 * GIB, GIB) == int(0.4 * 4 * GIB)
    assert default_kv_memory(500 * GIB, GIB) == CPU_KV_LIMIT
    assert default_kv_memory(GIB, 2 * GIB) == 0


def test_available_memory_is_the_systems_or_the_control_groups(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal:       100 kB\nMemAvailable:    64 kB\n")
    cgroup.mkdir()
    assert available_memory(meminfo, cgroup) == 64 * 1024
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000\n")
    assert available_memory(meminfo, cgroup) == 64 * 1024
    (cgroup / "memory.max").write_text("5000\n")
    assert available_memory(meminfo, cgroup) == 4000
    (cgroup / "memory.current").write_text("6000\n")
    assert available_memory(meminfo, cgroup) == 0


def test_files_that_were_read_lately_make_room(tmp_path: Path) -> None:
    """Their cache counts as used by the group that read them: after one load, that is the size of the weights."""
    (tmp_path / "meminfo").write_text("MemAvailable:    64 kB\n")
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4900\n")
    (tmp_path / "memory.stat").write_text("anon 900\nactive_file 1000\ninactive_file 3000\n")
    assert available_memory(tmp_path / "meminfo", tmp_path) == 5000 - 4900 + 3000


def test_a_system_that_does_not_say_is_asked_for_kv_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\n")
    for path in (tmp_path / "meminfo", tmp_path / "none"):
        assert available_memory(path, tmp_path) is None
    with pytest.raises(StartupError, match="set --kv-memory"):
        default_kv_memory(None, GIB)
