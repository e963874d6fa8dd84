"""On what a model runs: decided once at start, from what was asked for and what this machine has."""

from __future__ import annotations

import enum
import importlib.util
from dataclasses import dataclass

import torch

from sapwood_server.config import triton_interprets
from sapwood_server.errors import StartupError

LEAST_CAPABILITY = (8, 0)
"""Of a GPU. Below it there is neither bfloat16 nor `cp.async`, and the kernels count on both."""
DETERMINISTIC_CAPABILITY = (9, 0)
"""There the only way in which cuBLAS sums differently for another number of rows is splitting along K, which it does
not do without a workspace (vLLM's batch-invariant mode rests on the same)."""
UNTRIED_CAPABILITY = (10, 0)
"""From here on nobody has tried the kernels: they take the tiles of an older GPU."""


class DeviceKind(enum.Enum):
    """Which runner computes. The values are those of `--device`."""

    CPU = "cpu"
    CUDA = "cuda"
    INTERPRETER = "interpreter"
    """The runner for GPUs on the CPU, its kernels run by Triton's interpreter: thousands of times slower, for tests and
    for looking at kernels."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What torch and Triton say about this machine."""

    has_triton: bool
    triton_interprets: bool
    """Whether kernels that this process defines are run by the interpreter."""
    gpu_name: str | None = None
    """Of the first GPU; None if torch can use none."""
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """What computes, and why."""

    kind: DeviceKind
    detail: str
    """The GPU's name, or the CPU's vector capability and threads."""
    reason: str
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a GPU."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors lie: the first GPU, or the CPU."""
        return torch.device("cuda", 0) if self.kind is DeviceKind.CUDA else torch.device("cpu")


def choose_device(asked: str, facts: DeviceFacts) -> DeviceChoice:
    """The device that `--device` asks for; `auto` is a GPU if there is one that can be used.

    StartupError, one line, for a device that can't be used.
    """
    if asked == DeviceKind.CPU.value:
        return _cpu("--device asks for it")
    if asked == DeviceKind.INTERPRETER.value:
        if not facts.has_triton:
            raise StartupError("--device is interpreter, but triton is not installed (pip install 'sapwood[cuda]')")
        if not facts.triton_interprets:
            raise StartupError("--device is interpreter, which needs TRITON_INTERPRET=1 in this process's environment")
        return DeviceChoice(kind=DeviceKind.INTERPRETER, detail=_cpu_detail(), reason="--device asks for it")
    problem = find_gpu_problem(facts)
    is_untried = facts.capability >= UNTRIED_CAPABILITY
    if problem is None and is_untried and asked == "auto":
        major, minor = facts.capability
        problem = f"{facts.gpu_name} has compute capability {major}.{minor}, which is untried (accepted: --device cuda)"
    if problem is None:
        return DeviceChoice(
            kind=DeviceKind.CUDA,
            detail=f"{facts.gpu_name}, compute capability {facts.capability[0]}.{facts.capability[1]}",
            reason=_gpu_reason(asked, is_untried),
            capability=facts.capability,
        )
    if asked == DeviceKind.CUDA.value:
        raise StartupError(f"--device is cuda, but {problem}")
    return _cpu(problem)


def find_gpu_problem(facts: DeviceFacts) -> str | None:
    """Why no GPU can be used, None if one can."""
    if facts.gpu_name is None:
        return "torch finds no CUDA GPU"
    if facts.capability < LEAST_CAPABILITY:
        major, minor = facts.capability
        return f"{facts.gpu_name} has compute capability {major}.{minor} (accepted: 8.0 or higher)"
    if not facts.has_triton:
        return "triton is not installed (pip install 'sapwood[cuda]')"
    if facts.triton_interprets:
        return "TRITON_INTERPRET=1 in this process's environment has kernels run on the CPU"
    return None


def check_deterministic(device: DeviceChoice) -> None:
    """StartupError if products on this device may depend on the number of rows, whatever we set."""
    if device.kind is DeviceKind.CUDA and device.capability != DETERMINISTIC_CAPABILITY:
        raise StartupError(
            f"--deterministic needs a GPU of compute capability 9.0: on {device.detail} cuBLAS may sum in an order "
            "that depends on the number of rows (accepted: --device cpu)"
        )


def read_device_facts() -> DeviceFacts:
    """Of this machine and this process. (CUDA is asked, triton is only looked for.)"""
    has_triton = importlib.util.find_spec("triton") is not None
    interprets = triton_interprets()
    if torch.version.cuda is None or not torch.cuda.is_available():
        return DeviceFacts(has_triton=has_triton, triton_interprets=interprets)
    return DeviceFacts(
        has_triton=has_triton,
        triton_interprets=interprets,
        gpu_name=torch.cuda.get_device_name(0),
        capability=torch.cuda.get_device_capability(0),
    )


def _gpu_reason(asked: str, is_untried: bool) -> str:
    if asked != DeviceKind.CUDA.value:
        return "torch and triton can use it"
    return "--device asks for it" + (", though nobody has tried the kernels on such a GPU" if is_untried else "")


def _cpu(reason: str) -> DeviceChoice:
    return DeviceChoice(kind=DeviceKind.CPU, detail=_cpu_detail(), reason=reason)


def _cpu_detail() -> str:
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
