"""Where and with what a figure was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import msgspec

_PACKAGES = ("sapwood", "torch", "tokenizers", "gguf", "numpy")
_CPUINFO = Path("/proc/cpuinfo")
_VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a figure depends on."""

    cpu: str
    cores: int
    """Logical cores that this process may use."""
    vector_flags: tuple[str, ...]
    system: str
    python: str
    packages: dict[str, str]
    date: str
    load_average: float
    """Runnable processes over the last minute, when the bench began: near 0 on a quiet machine."""


def this_machine() -> Machine:
    """The machine that this process runs on, now."""
    model, flags = _cpuinfo()
    return Machine(
        cpu=model,
        cores=len(os.sched_getaffinity(0)),
        vector_flags=tuple(flag for flag in _VECTOR_FLAGS if flag in flags),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages={name: importlib.metadata.version(name) for name in _PACKAGES},
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        load_average=round(os.getloadavg()[0], 2),
    )


def _cpuinfo() -> tuple[str, frozenset[str]]:
    """The first processor's model name and flags; the platform's own words where there is no /proc."""
    if not _CPUINFO.exists():
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields.get("model name", platform.machine()), frozenset(fields.get("flags", "").split())
