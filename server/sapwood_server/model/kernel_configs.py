"""The attention kernels' tile sizes for one model on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sapwood_kernels.config_table import INTERPRETER_ARCH, AttentionConfig, ConfigKey, attention_config
from sapwood_kernels.values import AttentionPhase
from sapwood_server.errors import StartupError
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.devices import DeviceChoice, DeviceKind


@dataclass(frozen=True, kw_only=True)
class KernelConfigs:
    """One per phase."""

    arch: int
    """Compute capability that they were looked up for, 90 for 9.0; INTERPRETER_ARCH on the CPU."""
    prefill: AttentionConfig
    decode: AttentionConfig


def find_kernel_configs(config: ModelConfig, dtype: torch.dtype, device: DeviceChoice) -> KernelConfigs:
    """Those of the table. StartupError, naming what is accepted, for a model that no kernel was made for."""
    major, minor = device.capability
    arch = 10 * major + minor if device.kind is DeviceKind.CUDA else INTERPRETER_ARCH

    def find(phase: AttentionPhase) -> AttentionConfig:
        group = config.num_heads // config.num_kv_heads
        return attention_config(ConfigKey(arch=arch, head_dim=config.head_dim, group=group, dtype=dtype, phase=phase))

    try:
        return KernelConfigs(arch=arch, prefill=find(AttentionPhase.PREFILL), decode=find(AttentionPhase.DECODE))
    except ValueError as error:
        raise StartupError(f"the model can't run on --device {device.kind.value}: {error}") from error
