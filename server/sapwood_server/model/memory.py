"""How a device's memory is shared out: weights, KV pages, and what a step needs besides."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from sapwood_server.errors import StartupError
from sapwood_server.model.config import ModelConfig

CPU_KV_SHARE = 0.4
"""Of the memory that is available once weights are counted, what pages take by default on a CPU."""
CPU_KV_LIMIT = 4 * 2**30
"""Bytes; a CPU's default stays under this."""
DENSE_SHARE = 0.5
"""Dense copies of decoding sequences may take this share of what the pages take, on top of it. They are made when
needed; without room for one, a sequence decodes from pages, slower."""
MIN_SEQUENCE_TOKENS = 256
"""What one sequence must have room for if nobody says how long they get: a pool below that can't hold a short chat."""


@dataclass(frozen=True, kw_only=True)
class KVPlan:
    """The memory for keys and values."""

    page_size: int
    """Tokens."""
    num_pages: int
    """Page 0, which is reserved, included."""
    bytes_per_token: int
    dense_bytes: int
    """Most that dense copies may take in all."""

    @property
    def num_tokens(self) -> int:
        """That all pages hold, the reserved one excluded."""
        return (self.num_pages - 1) * self.page_size

    @property
    def num_bytes(self) -> int:
        """Of all pages."""
        return self.num_pages * self.page_size * self.bytes_per_token


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def plan_kv(config: ModelConfig, dtype: torch.dtype, page_size: int, sequence_tokens: int, memory: int) -> KVPlan:
    """Pages for `memory` bytes. StartupError with both numbers if one sequence of `sequence_tokens` does not fit.

    Never more than 2**31 slots.
    """
    per_token = kv_bytes_per_token(config, dtype)
    page_bytes = per_token * page_size
    num_pages = min(memory // page_bytes, 2**31 // page_size)
    needed = (-(-sequence_tokens // page_size) + 1) * page_bytes
    if num_pages * page_bytes < needed:
        raise StartupError(
            f"KV memory is {memory} bytes, but one sequence of {sequence_tokens} tokens needs {needed} bytes "
            "(raise --kv-memory or lower --max-model-len)"
        )
    return KVPlan(
        page_size=page_size,
        num_pages=num_pages,
        bytes_per_token=per_token,
        dense_bytes=int(num_pages * page_bytes * DENSE_SHARE),
    )


def default_kv_memory(available: int | None, weights: int) -> int:
    """Bytes for KV pages on a CPU with `available` bytes free, of which `weights` (and the rotary table) are still to
    be taken. StartupError if nobody knows how many are free."""
    if available is None:
        raise StartupError("the system does not say how much memory is available (set --kv-memory)")
    return max(0, min(int((available - weights) * CPU_KV_SHARE), CPU_KV_LIMIT))


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take: the system's `MemAvailable`, or what the control group at `cgroup`
    (version 2, as a container sees its own) leaves if that is less. None if the system does not say."""
    system = _read_fields(meminfo).get("MemAvailable:")
    if system is None:
        return None
    limit = _read_int(cgroup / "memory.max")
    used = _read_int(cgroup / "memory.current")
    if limit is None or used is None:
        return system * 1024
    # Files that were read lately count as used, but make room when it is needed: above all the weights' own files.
    reclaimable = _read_fields(cgroup / "memory.stat").get("inactive_file", 0)
    return min(system * 1024, max(0, limit - used + reclaimable))


def give_back_freed_memory() -> bool:
    """Has glibc return freed blocks to the system, and says whether it could be asked. It keeps those of under
    32 MiB: after a start, as much as the weights take in the form they were read in."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(ctypes.c_size_t(0))
    return True


def _read_fields(path: Path) -> dict[str, int]:
    """The lines of a file that are a name and a number, perhaps with a unit; empty if there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _read_int(path: Path) -> int | None:
    """The number in a file; None if there is none (no such file, or `max`)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
