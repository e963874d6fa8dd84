"""The device that is measured, and what stands in for it in a dry run.

`python -m sapwood_bench.kernels.device` answers whether there is one: exit code 0, or 2 with a line that says why not.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from sapwood_bench.kernels.timing import Prepare, cuda_sampler, host_sampler

_ROOT = Path(__file__).resolve().parents[3]
_TOOL_SECONDS = 10.0


class NoDeviceError(Exception):
    """Nothing can be measured here: one line that says why."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where calls run and how they are timed."""

    torch_device: torch.device
    prepare: Prepare
    l2_bytes: int
    dry: bool
    """Tiny cases in Triton's interpreter: no figure means anything."""


def measured_device(dry: bool) -> Device:
    """The first GPU; with `dry`, the CPU. NoDeviceError if this process can't use it."""
    interprets = triton.knobs.runtime.interpret
    if dry:
        if not interprets:
            raise NoDeviceError("a dry run needs TRITON_INTERPRET=1 in this process's environment")
        return Device(torch_device=torch.device("cpu"), prepare=host_sampler, l2_bytes=0, dry=True)
    if interprets:
        raise NoDeviceError("TRITON_INTERPRET=1 in this process's environment has kernels run on the CPU")
    if not torch.cuda.is_available():
        raise NoDeviceError("torch finds no CUDA GPU")
    device = torch.device("cuda", 0)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return Device(torch_device=device, prepare=cuda_sampler, l2_bytes=l2_bytes, dry=False)


def describe(device: Device) -> dict[str, str | int]:
    """What a figure depends on: GPU, driver, versions, commit."""
    facts: dict[str, str | int] = {
        "gpu": "none: Triton's interpreter, a dry run",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": triton.__version__,
        "numpy": importlib.metadata.version("numpy"),
        "commit": _said(["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12"]),
    }
    if not device.dry:
        properties = torch.cuda.get_device_properties(device.torch_device)
        facts |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": device.l2_bytes,
            "driver": _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
            "clocks": _said(
                ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,temperature.gpu", "--format=csv,noheader"]
            ),
        }
    return facts


def _said(command: list[str]) -> str:
    """A tool's answer on one line; "unknown" where there is no such tool or it fails, as git does without a clone."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return " ".join(done.stdout.split()) if done.returncode == 0 else "unknown"


def main(arguments: Sequence[str]) -> int:
    """`--dry-run` asks for what stands in for a GPU; anything else asks for one."""
    try:
        measured_device(dry="--dry-run" in arguments)
    except NoDeviceError as error:
        print(f"sapwood bench kernels: {error}; nothing was measured", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
