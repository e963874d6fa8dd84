"""The rows of the config table as cases of the compile gate: which are judged, and under which names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from sapwood_kernels.config_table import INTERPRETER_ARCH, AttentionConfig, ConfigKey, ConfigRow, config_rows
from sapwood_kernels.gate import CompiledKernel
from sapwood_kernels.gate_cases import AttentionCase, compile_attention
from sapwood_kernels.values import AttentionPhase
from support.gate_process import in_gate_process
from support.scale import suite_scale

E4M3 = torch.float8_e4m3fn
THOROUGH_ARCHS = (80, 90)
USUAL_HEAD_DIMS = (64, 128, 256)

# What `make test` compiles, 2 to 3 s each: the head dims that most models have, and the largest.
SLICE = {
    "sm_90 prefill 64 bfloat16 group 3",
    "sm_90 prefill 128 float16 group 8 every rule",
    "sm_90 prefill 256 bfloat16 group 1 e4m3",
    "sm_80 prefill 128 float16 group 8 every rule",
    "sm_90 prefill 64 float32 group 3",
    "sm_90 decode 64 bfloat16 group 1 e4m3",
    "sm_90 decode 128 bfloat16 group 3",
    "sm_80 decode 128 float16 group 8 every rule",
}


def case_name(case: AttentionCase) -> str:
    """Says what is compiled, for the name of a test."""
    key = case.key
    words = [
        f"sm_{key.arch} {key.phase.value} {key.head_dim} {str(key.dtype).removeprefix('torch.')} group {key.group}"
    ]
    words += ["e4m3"] if case.kv_dtype is E4M3 else []
    words += ["every rule"] if case.softcap else []
    return " ".join(words)


def judged_cases(phase: AttentionPhase) -> list[AttentionCase]:
    """The cases of the gate: all, or the slice that `make test` has time for."""
    cases = [case for row in config_rows() if row.phase is phase for case in _cases_of(row)]
    return cases if suite_scale() == 1 else [case for case in cases if case_name(case) in SLICE]


def _cases_of(row: ConfigRow) -> list[AttentionCase]:
    """How a row is compiled: each of its head dims, and three of them in other ways, with other groups and dtypes."""
    half = row.dtypes[0] is not torch.float32
    if row.arch == INTERPRETER_ARCH or (row.arch not in THOROUGH_ARCHS and not half):
        return []
    cases = []
    for head_dim in row.head_dims:
        if head_dim not in USUAL_HEAD_DIMS and not (half and row.arch in THOROUGH_ARCHS):
            continue
        plain = AttentionCase(key=_key(row, head_dim, 3, row.dtypes[0]), config=row.config)
        cases.append(plain)
        if head_dim in USUAL_HEAD_DIMS and half and len(row.groups) > 1:
            key = _key(row, head_dim, 8, row.dtypes[-1])
            cases.append(dataclasses.replace(plain, key=key, window=100, softcap=30.0, sinks=True))
            if row.arch >= 89:
                key = _key(row, head_dim, 1, row.dtypes[0])
                cases.append(dataclasses.replace(plain, key=key, kv_dtype=E4M3))
    return cases


def _key(row: ConfigRow, head_dim: int, group: int, dtype: torch.dtype) -> ConfigKey:
    group = group if len(row.groups) > 1 else row.groups[0]
    return ConfigKey(arch=row.arch, head_dim=head_dim, group=group, dtype=dtype, phase=row.phase)


def compile_or_say_why(case: AttentionCase) -> list[CompiledKernel] | str:
    """The kernels, or the error: one bad case must not hide what became of the others."""
    try:
        return compile_attention(case)
    except Exception as error:  # noqa: BLE001 - whatever Triton raises is the finding
        return f"{type(error).__name__}: {error}"


def compiled_cases(phase: AttentionPhase, cache: Path) -> dict[str, list[CompiledKernel] | str]:
    """Every judged case of a phase, compiled in one process of its own, by name."""
    cases = judged_cases(phase)
    found = in_gate_process(compile_or_say_why, cases, cache)
    return dict(zip(map(case_name, cases), found, strict=True))


def narrow_loads(kernel: CompiledKernel) -> dict[int, int]:
    """Loads under 4 bytes, which no int32 index needs: keys or values loaded one by one."""
    return {width: count for width, count in kernel.global_loads.items() if width < 4}


def bound_of(config: AttentionConfig, number: int) -> int:
    """The register bound of a launch's first or second kernel."""
    return config.max_wide_registers if number else config.max_registers
