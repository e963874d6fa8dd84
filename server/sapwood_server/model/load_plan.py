"""What a start decides before a weight is read: device, dtype, context and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sapwood_server.config import ServerConfig, onednn_isa_limit
from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import read_gguf_header
from sapwood_server.formats.model_files import ModelFiles, resolve_model
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.device_memory import (
    GpuMemory,
    StepSizes,
    check_gpu_memory,
    gpu_kv_memory,
    read_gpu_memory,
    step_bytes,
)
from sapwood_server.model.devices import (
    DeviceChoice,
    DeviceKind,
    check_deterministic,
    choose_device,
    read_device_facts,
)
from sapwood_server.model.dtype import (
    DtypeChoice,
    choose_cpu_dtype,
    choose_gpu_dtype,
    choose_interpreter_dtype,
    read_cpu_flags,
)
from sapwood_server.model.gguf_source import num_packed_parameters
from sapwood_server.model.kernel_configs import find_kernel_configs
from sapwood_server.model.memory import (
    CPU_KV_LIMIT,
    MIN_SEQUENCE_TOKENS,
    KVPlan,
    available_memory,
    default_kv_memory,
    kv_bytes_per_token,
    plan_kv,
)
from sapwood_server.model.rope import rotary_bytes
from sapwood_server.model.weight_plan import WeightPlan, num_parameters, plan_plain_weights, plan_weights

CPU_STEP_MULTIPLICATIONS = 50 * 10**9
"""What a step may multiply: a quarter of what two cores with AMX do in a second, half of what they do without it."""
MIN_BATCHED_TOKENS = 32
MAX_BATCHED_TOKENS = 512
GPU_STEP_MULTIPLICATIONS = 70 * 10**12
"""The same on a GPU: a quarter of a second at 280 * 10**12 multiplications a second, some 70 % of what an H200 does in
bf16. A guess, to be measured."""
GPU_MIN_BATCHED_TOKENS = 512
GPU_MAX_BATCHED_TOKENS = 8192
INTERPRETER_BATCHED_TOKENS = 32
"""A step of the demo model then takes some ten seconds."""


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Everything decided before a weight is read."""

    device: DeviceChoice
    files: ModelFiles
    config: ModelConfig
    dtype: DtypeChoice
    deterministic: bool
    max_model_len: int
    max_batched_tokens: int
    max_num_seqs: int
    kv: KVPlan
    weights: WeightPlan


def plan_load(config: ServerConfig) -> LoadPlan:
    """Device, dtype, context and memory. StartupError for what can't be."""
    device = choose_device(config.device, read_device_facts())
    if config.deterministic:
        check_deterministic(device)
    files = resolve_model(config.model)
    model = load_model_config(files)
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise StartupError(
            f"--max-model-len is {max_model_len}, but the model's context is {model.max_position_embeddings} tokens"
        )
    model.check_context(max_model_len)
    dtype = choose_dtype(config.dtype, device.kind)
    max_batched_tokens = config.max_batched_tokens or default_max_batched_tokens(model, device.kind)
    max_num_seqs = min(config.max_num_seqs, max_batched_tokens)  # each that runs takes a token of every step
    kernels = None if device.kind is DeviceKind.CPU else find_kernel_configs(model, dtype.dtype, device)
    sizes = None
    if kernels is not None:
        sizes = StepSizes(
            num_tokens=max_batched_tokens,
            num_sequences=max_num_seqs,
            max_model_len=max_model_len,
            split_size=None if config.deterministic else kernels.decode.split_size,
        )
    if device.kind is DeviceKind.CUDA and sizes is not None:
        gpu = read_gpu_memory(device.torch_device)
        weights, kv_memory = share_gpu_memory(config, gpu, model, dtype.dtype, sizes)
    else:
        step = 0 if sizes is None else step_bytes(model, dtype.dtype, sizes)
        weights, kv_memory = _share_cpu_memory(config, files, model, dtype.dtype, max_model_len, step)
    sequence_tokens = config.max_model_len or min(max_model_len, MIN_SEQUENCE_TOKENS)
    kv = plan_kv(model, dtype.dtype, config.page_size, sequence_tokens, kv_memory)
    decodes_from_copies = device.kind is DeviceKind.CPU and not config.deterministic
    return LoadPlan(
        device=device,
        files=files,
        config=model,
        dtype=dtype,
        deterministic=config.deterministic,
        max_model_len=max_model_len,
        max_batched_tokens=max_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv=kv if decodes_from_copies else replace(kv, dense_bytes=0),
        weights=weights,
    )


def choose_dtype(asked: str, device: DeviceKind) -> DtypeChoice:
    """The dtype that `--dtype` asks for, or this device's own."""
    match device:
        case DeviceKind.CPU:
            return choose_cpu_dtype(asked, read_cpu_flags(), onednn_isa_limit())
        case DeviceKind.CUDA:
            return choose_gpu_dtype(asked)
        case DeviceKind.INTERPRETER:
            return choose_interpreter_dtype(asked)


def default_max_batched_tokens(config: ModelConfig, device: DeviceKind = DeviceKind.CPU) -> int:
    """A power of two, by the number of multiplications: a step takes under half a second on two cores, or about a
    quarter of a second on an H200.

    Never under MIN_BATCHED_TOKENS, though with more than 1.5 billion parameters a step then takes longer on a CPU: it
    reads all weights however few its tokens, which takes as long as the multiplications of some 20 tokens.
    """
    if device is DeviceKind.INTERPRETER:
        return INTERPRETER_BATCHED_TOKENS
    if device is DeviceKind.CUDA:
        tokens = GPU_STEP_MULTIPLICATIONS // num_parameters(config)
        return _power_of_two(tokens, GPU_MIN_BATCHED_TOKENS, GPU_MAX_BATCHED_TOKENS)
    return _power_of_two(CPU_STEP_MULTIPLICATIONS // num_parameters(config), MIN_BATCHED_TOKENS, MAX_BATCHED_TOKENS)


def _power_of_two(number: int, low: int, high: int) -> int:
    return max(low, min(high, 1 << max(0, number.bit_length() - 1)))


def _share_cpu_memory(
    config: ServerConfig, files: ModelFiles, model: ModelConfig, dtype: torch.dtype, max_model_len: int, step: int
) -> tuple[WeightPlan, int]:
    """Weights, and bytes for pages. step: bytes that a step of the interpreter takes besides."""
    available = available_memory()
    num_q4 = num_packed_parameters(read_gguf_header(files.location)) if files.is_gguf else 0
    weights = plan_weights(model, dtype, num_q4, available, deterministic=config.deterministic)
    if config.kv_memory_bytes is not None:
        return weights, config.kv_memory_bytes
    most_tokens = min(max_model_len, CPU_KV_LIMIT // kv_bytes_per_token(model, dtype))
    return weights, default_kv_memory(available, weights.num_bytes + rotary_bytes(model, most_tokens) + step)


def share_gpu_memory(
    config: ServerConfig, memory: GpuMemory, model: ModelConfig, dtype: torch.dtype, sizes: StepSizes
) -> tuple[WeightPlan, int]:
    """Weights, and bytes for pages. StartupError, with both numbers, for what does not fit."""
    weights = plan_plain_weights(model, dtype)
    step = step_bytes(model, dtype, sizes)
    stated = config.kv_memory_bytes
    if stated is None:
        return weights, gpu_kv_memory(memory, config.gpu_memory_utilization, weights.num_bytes, step)
    check_gpu_memory(memory, stated, weights.num_bytes, step)
    return weights, stated
