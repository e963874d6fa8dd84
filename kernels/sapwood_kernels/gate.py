"""The compile gate: what a kernel becomes on a GPU, seen on a machine that has none.

The launcher itself is called, with small CPU tensors, under a driver that compiles and starts nothing. So a kernel is
specialised exactly as in service: by its pointers' and strides' divisibility, which decides between loads of 16 bytes
and of one element. Triton brings ptxas and cuobjdump. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import Benchmarker, DriverBase

from sapwood_kernels.ptx import Loop, count_instructions, exponential_loops, global_load_widths

SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 87: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that a block may have, by compute capability (CUDA programming guide, "Technical Specifications")."""

MULTIPROCESSOR_SHARED_BYTES = {80: 164 * 1024, 86: 100 * 1024, 89: 100 * 1024, 90: 228 * 1024}
"""What all blocks on a multiprocessor share, of which each takes 1 KiB besides its own (same source)."""

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """One specialisation of a kernel, as compiled for one compute capability."""

    name: str
    arch: int
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread, in local memory: what did not fit the registers was spilt there."""
    shared_bytes: int
    """Per block."""
    wgmma: int
    """Matrix instructions of a warp group (Hopper)."""
    mma_sync: int
    """Matrix instructions of a warp."""
    async_copies: int
    """Copies from global to shared memory that pass no register (`cp.async`)."""
    global_loads: Mapping[int, int]
    """Bytes of one load of a thread, to how many such loads the kernel has."""
    loops: tuple[Loop, ...]


def compile_launch(arch: int, launch: Callable[[], object]) -> list[CompiledKernel]:
    """What the kernels become that `launch()` starts, in that order, each specialisation once.

    arch is a compute capability, 90 for 9.0. No kernel runs, so what `launch` returns is void. Raises RuntimeError in
    Triton's interpreter or if nothing was launched, and what Triton raises for a kernel that can't be compiled.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "the compile gate needs a process without TRITON_INTERPRET: kernels are interpreted in this one"
        )
    with _compile_only(arch) as compiled:
        launch()
    if not compiled:
        raise RuntimeError("nothing was launched")
    return [_read(arch, files) for files in compiled.values()]


def violations(kernel: CompiledKernel, max_registers: int, may_spill: bool = False) -> list[str]:
    """What keeps a kernel from running, or from running well, in words; empty if nothing does."""
    found = []
    if kernel.stack_bytes and not may_spill:
        found.append(f"spills {kernel.stack_bytes} bytes a thread")
    if kernel.registers > max_registers:
        found.append(f"has {kernel.registers} registers a thread; its bound is {max_registers}")
    if kernel.shared_bytes > SHARED_BYTES[kernel.arch]:
        found.append(f"has {kernel.shared_bytes} bytes of shared memory; {kernel.arch} has {SHARED_BYTES[kernel.arch]}")
    return found


def resident_programs(kernel: CompiledKernel) -> int:
    """Programs that a multiprocessor's shared memory holds at once."""
    return MULTIPROCESSOR_SHARED_BYTES[kernel.arch] // (kernel.shared_bytes + 1024)


class _CompileOnly(DriverBase):  # type: ignore[misc]
    """A device that a kernel is compiled for and never sent to. The names are Triton's."""

    def __init__(self, arch: int) -> None:
        super().__init__()
        self.arch = arch
        self.utils = self

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Kernels are kept by device: so each capability has its own."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *arguments: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        """So much that Triton itself refuses nothing: `violations` names it instead."""
        return {"max_shared_mem": 2**31 - 1}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, int, int, int, int]:
        """Nothing to unload, no function, no counts, the most threads that a block can have."""
        return None, 0, 0, 0, 1024

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched")

    def get_active_torch_device(self) -> object:
        raise NotImplementedError("nothing is launched")

    def get_benchmarker(self) -> Benchmarker:
        raise NotImplementedError("nothing is launched")


@contextmanager
def _compile_only(arch: int) -> Iterator[dict[str, Mapping[str, str]]]:
    """Collects the files of each kernel that is launched meanwhile, by the hash of what it was compiled from."""
    compiled: dict[str, Mapping[str, str]] = {}

    def record(module: object, function: object, name: str, files: Mapping[str, str], key: str) -> None:
        compiled[key] = files

    hooks = triton.knobs.runtime.kernel_load_start_hook
    hooks.add(record)
    triton.runtime.driver.set_active(_CompileOnly(arch))
    try:
        yield compiled
    finally:
        hooks.remove(record)
        triton.runtime.driver.set_active(None)  # the next one who asks finds the machine's own


def _read(arch: int, files: Mapping[str, str]) -> CompiledKernel:
    """A kernel from the files that Triton wrote: PTX, binary and metadata."""
    by_suffix = {Path(name).suffix: Path(path) for name, path in files.items()}
    metadata = json.loads(by_suffix[".json"].read_text(encoding="utf-8"))
    ptx = by_suffix[".ptx"].read_text(encoding="utf-8")
    tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", by_suffix[".cubin"]]
    usage = _RESOURCES.search(subprocess.run(tool, capture_output=True, text=True, check=True).stdout)
    if usage is None:
        raise RuntimeError(f"cuobjdump says nothing about {metadata['name']}")
    return CompiledKernel(
        name=metadata["name"],
        arch=arch,
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        shared_bytes=metadata["shared"],
        wgmma=count_instructions(ptx, "wgmma.mma_async"),
        mma_sync=count_instructions(ptx, "mma.sync"),
        async_copies=count_instructions(ptx, "cp.async.ca", "cp.async.cg"),
        global_loads=global_load_widths(ptx),
        loops=exponential_loops(ptx),
    )
