"""The dtype a CPU gets by default, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sapwood_server.errors import StartupError
from sapwood_server.model.dtype import (
    choose_cpu_dtype,
    choose_gpu_dtype,
    choose_interpreter_dtype,
    read_cpu_flags,
)
from support.stepping import Driver, make_config, make_runner
from support.tiny_models import make_tiny_model

OLD, NEW = frozenset({"avx2", "avx512f"}), frozenset({"avx512f", "avx512_bf16", "amx_bf16"})


@pytest.mark.parametrize(
    ("asked", "flags", "limit", "dtype", "reason"),
    [
        ("auto", NEW, None, torch.bfloat16, "the CPU has amx_bf16 and avx512_bf16"),
        ("auto", frozenset({"avx512_bf16"}), None, torch.bfloat16, "the CPU has avx512_bf16"),
        ("auto", OLD, None, torch.float32, "the CPU has neither AVX512-BF16 nor AMX"),
        ("auto", frozenset(), None, torch.float32, "the CPU has neither AVX512-BF16 nor AMX"),
        ("auto", NEW, "AVX512_CORE", torch.float32, "ONEDNN_MAX_CPU_ISA=AVX512_CORE keeps oneDNN from"),
        ("auto", NEW, "AVX2", torch.float32, "ONEDNN_MAX_CPU_ISA=AVX2 keeps oneDNN from"),
        ("auto", NEW, "AVX512_CORE_BF16", torch.bfloat16, "the CPU has"),
        ("auto", OLD, "AVX512_CORE_BF16", torch.float32, "neither"),
        ("float32", NEW, None, torch.float32, "--dtype asks for it"),
        ("bfloat16", OLD, "AVX2", torch.bfloat16, "--dtype asks for it"),
        ("float16", NEW, None, torch.float16, "--dtype asks for it"),
    ],
)
def test_choices(asked: str, flags: frozenset[str], limit: str | None, dtype: torch.dtype, reason: str) -> None:
    choice = choose_cpu_dtype(asked, flags, limit)
    assert choice.dtype == dtype
    assert reason in choice.reason
    assert f"torch.{choice.name}" == str(dtype)


def test_choices_on_a_gpu_and_in_the_interpreter() -> None:
    assert choose_gpu_dtype("auto").dtype == torch.bfloat16
    assert choose_gpu_dtype("float32").dtype == torch.float32
    assert choose_interpreter_dtype("auto").dtype == torch.float32
    assert choose_interpreter_dtype("float16").dtype == torch.float16
    with pytest.raises(StartupError, match=r"interpreter gets wrong \(accepted: float32, float16\)"):
        choose_interpreter_dtype("bfloat16")


_GENERATE = """
import json, sys
from support.stepping import Driver, make_config, make_runner
runner = make_runner(make_config(sys.argv[1], dtype="auto"))
print(json.dumps([runner.info.dtype, runner.info.dtype_reason, Driver(runner).generate([9, 8, 7], 12, 64)]))
"""


@pytest.mark.parametrize("limit", ["AVX512_CORE", "avx2"])
def test_a_process_held_back_by_onednn_computes_in_fp32(limit: str, tmp_path: Path) -> None:
    """The other branch, for real: oneDNN reads its variable when it is loaded."""
    folder = make_tiny_model(tmp_path / "model")
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", _GENERATE, str(folder)],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": limit, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    dtype, reason, ids = json.loads(done.stdout)
    assert dtype == "float32"
    assert f"ONEDNN_MAX_CPU_ISA={limit.upper()}" in reason or "neither" in reason
    assert ids == Driver(make_runner(make_config(folder))).generate([9, 8, 7], 12, 64)


def test_flags_are_the_first_processors(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: X\nflags\t\t: fpu amx_bf16\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert read_cpu_flags(path) == frozenset({"fpu", "amx_bf16"})
    path.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert read_cpu_flags(path) == frozenset({"fp", "asimd", "bf16"})
    path.write_text("processor\t: 0\n")
    assert read_cpu_flags(path) is None


def test_a_system_that_does_not_say_is_asked_for_a_dtype(tmp_path: Path) -> None:
    """And starts once it is told."""
    flags = read_cpu_flags(tmp_path / "cpuinfo")
    assert flags is None
    with pytest.raises(StartupError, match=r"does not say what its CPU can do \(set --dtype\)"):
        choose_cpu_dtype("auto", flags, None)
    assert choose_cpu_dtype("bfloat16", flags, None).dtype == torch.bfloat16
