"""How a row of the config table is compiled: what its bounds and its tiles must hold for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sapwood_kernels.attention_check import FP8, FP8_ARCH
from sapwood_kernels.config_table import AttentionConfig, ConfigKey, ConfigRow
from sapwood_kernels.gate import CompiledKernel, violations
from sapwood_kernels.gate_cases import AttentionCase

MOST_REGISTERS = 255
"""That a thread can have."""
Compile = Callable[[AttentionCase], list[CompiledKernel]]


def variants_of(row: ConfigRow, config: AttentionConfig) -> list[AttentionCase]:
    """At every head dim and dtype of the row: plain, with every rule at once, and on e4m3 where the device has it. The
    largest group takes most registers for itself."""
    found = []
    for head_dim in row.head_dims:
        for dtype in row.dtypes:
            key = ConfigKey(arch=row.arch, head_dim=head_dim, group=row.groups[-1], dtype=dtype, phase=row.phase)
            plain = AttentionCase(key=key, config=config)
            found += [plain, replace(plain, window=100, softcap=30.0, sinks=True)]
            if row.arch >= FP8_ARCH and dtype is not torch.float32:
                found.append(replace(plain, kv_dtype=FP8))
    return found


@dataclass(frozen=True)
class Compiled:
    """What became of a config in all variants of its row."""

    config: AttentionConfig
    """With the bounds that were seen."""
    problems: Sequence[str]
    """Why it can't be used: spills outside fp32, too much shared memory. Empty if it can."""


def compiled(row: ConfigRow, config: AttentionConfig, compile_: Compile) -> Compiled:
    """The config with its register bounds as `compile_` sees them, over all variants of the row."""
    free = replace(
        config, max_registers=MOST_REGISTERS, max_wide_registers=MOST_REGISTERS if config.row_blocks > 1 else 0
    )
    most = [0, 0]
    problems = []
    for case in variants_of(row, free):
        for number, kernel in enumerate(compile_(case)):
            most[number] = max(most[number], kernel.registers)
            may_spill = case.key.dtype is torch.float32
            problems += [f"{kernel.name}: {each}" for each in violations(kernel, MOST_REGISTERS, may_spill)]
    return Compiled(replace(config, max_registers=most[0], max_wide_registers=most[1]), sorted(set(problems)))
