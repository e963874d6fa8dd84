"""Which dtype a model runs in, and why: decided once at start from what the device can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sapwood_server.errors import StartupError

_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
_BF16_ISA_LIMITS = frozenset(
    {
        "AVX512_CORE_BF16",
        "AVX512_CORE_FP16",
        "AVX512_CORE_AMX",
        "AVX512_CORE_AMX_FP16",
        "AVX10_1_512",
        "AVX10_1_512_AMX",
        "AVX10_1_512_AMX_FP16",
        "AVX10_2_512",
        "AVX10_2_512_AMX_2",
    }
)
"""Values of oneDNN's ONEDNN_MAX_CPU_ISA under which it still multiplies bf16 in hardware."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype of weights, activations and KV pages."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        """As `--dtype` takes it."""
        return str(self.dtype).removeprefix("torch.")


def choose_gpu_dtype(asked: str) -> DtypeChoice:
    """`asked` if it is not `auto`; else bf16, which every GPU that we accept multiplies in hardware."""
    if asked != "auto":
        return DtypeChoice(DTYPES[asked], "--dtype asks for it")
    return DtypeChoice(torch.bfloat16, "the GPU multiplies it in hardware")


def choose_interpreter_dtype(asked: str) -> DtypeChoice:
    """`asked` if it is not `auto`, else fp32. StartupError for bf16: Triton's interpreter multiplies its bit patterns
    as if they were integers."""
    if asked == "auto":
        return DtypeChoice(torch.float32, "Triton's interpreter has no bfloat16")
    if DTYPES[asked] == torch.bfloat16:
        raise StartupError("--dtype is bfloat16, which Triton's interpreter gets wrong (accepted: float32, float16)")
    return DtypeChoice(DTYPES[asked], "--dtype asks for it")


def choose_cpu_dtype(asked: str, cpu_flags: frozenset[str] | None, isa_limit: str | None) -> DtypeChoice:
    """`asked` if it is not `auto`. Else bf16 if this CPU multiplies it in hardware (AVX512-BF16 or AMX) and oneDNN may
    use that, else fp32: in software, bf16 takes two to four times as long as fp32. StartupError for `auto` if nobody
    knows what the CPU can do (None)."""
    if asked != "auto":
        return DtypeChoice(DTYPES[asked], "--dtype asks for it")
    if cpu_flags is None:
        raise StartupError("the system does not say what its CPU can do (set --dtype)")
    found = [flag for flag in _BF16_FLAGS if flag in cpu_flags]
    if not found:
        return DtypeChoice(torch.float32, "the CPU has neither AVX512-BF16 nor AMX")
    if isa_limit is not None and isa_limit not in _BF16_ISA_LIMITS:
        return DtypeChoice(torch.float32, f"ONEDNN_MAX_CPU_ISA={isa_limit} keeps oneDNN from the CPU's {found[0]}")
    return DtypeChoice(torch.bfloat16, f"the CPU has {' and '.join(found)}")


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str] | None:
    """The first processor's flags as Linux names them. None if the system does not say."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return None
