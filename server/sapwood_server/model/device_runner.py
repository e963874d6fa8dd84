"""The runner for GPUs, and for Triton's interpreter in place of one. Imports triton, so `load` imports it by name, and
only for such a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sapwood_kernels.decode_layout import resident_grid
from sapwood_kernels.dispatch_triton import triton_ops
from sapwood_server.config import cublas_may_split
from sapwood_server.errors import StartupError
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.cuda_graphs import DecodeGraphs, cuda_capture, decode_buckets
from sapwood_server.model.device_forward import DeviceForward, DeviceSetup
from sapwood_server.model.device_sampler import DeviceSampler
from sapwood_server.model.device_step import DeviceLimits
from sapwood_server.model.devices import DeviceChoice, DeviceKind
from sapwood_server.model.kernel_configs import find_kernel_configs
from sapwood_server.model.linear import PLAIN_FORMS
from sapwood_server.model.load_plan import LoadPlan
from sapwood_server.model.loaded_model import Model
from sapwood_server.model.memory import kv_bytes_per_token
from sapwood_server.model.random_weights import random_weights
from sapwood_server.model.runner import ModelRunner
from sapwood_server.model.weight_plan import num_parameters
from sapwood_server.model.weights import WeightPlacement
from sapwood_server.values.messages import EngineInfo

_INTERPRETER_SMS = 1
"""Programs of the interpreter run one after the other."""


def make_device_runner(plan: LoadPlan, model: Model, info: EngineInfo) -> ModelRunner:
    """A runner that has not run yet, on the device of the plan."""
    setup = make_setup(model, plan.device, make_limits(plan), deterministic=plan.deterministic)
    return assemble(model, setup, info)


def make_limits(plan: LoadPlan) -> DeviceLimits:
    """The most that a step of this plan may hold."""
    return DeviceLimits(
        num_tokens=plan.max_batched_tokens,
        num_sequences=plan.max_num_seqs,
        max_model_len=plan.max_model_len,
        page_size=plan.kv.page_size,
        num_pages=plan.kv.num_pages,
    )


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A model of some shape, of random weights, to measure a device with."""

    config: ModelConfig
    device: DeviceChoice
    dtype: torch.dtype
    limits: DeviceLimits
    deterministic: bool = False
    graphs: bool = True
    """Whether decode steps are captured, on a GPU."""


def make_random_runner(random: RandomModel) -> ModelRunner:
    """A runner that has not run yet: `warm_up` it, then `capture_graphs`. It has no vocabulary, so that every id may be
    drawn. StartupError for a shape that no kernel was made for."""
    config, limits = random.config, random.limits
    placement = WeightPlacement(random.dtype, random.device.torch_device)
    model = Model(config, random_weights(config, placement), PLAIN_FORMS, config.vocab_size)
    setup = make_setup(model, random.device, limits, deterministic=random.deterministic, graphs=random.graphs)
    info = EngineInfo(
        model="random weights",
        architecture=config.architecture,
        fingerprint="",
        device=random.device.kind.value,
        dtype=str(random.dtype).removeprefix("torch."),
        dtype_reason="asked for",
        deterministic=random.deterministic,
        vocab_size=config.vocab_size,
        max_model_len=limits.max_model_len,
        page_size=limits.page_size,
        num_pages=limits.num_pages,
        kv_bytes_per_token=kv_bytes_per_token(config, random.dtype),
        max_batched_tokens=limits.num_tokens,
        max_num_seqs=limits.num_sequences,
        weight_bytes=num_parameters(config) * random.dtype.itemsize,
        load_seconds=0.0,
    )
    return assemble(model, setup, info)


def make_setup(
    model: Model, device: DeviceChoice, limits: DeviceLimits, *, deterministic: bool, graphs: bool = True
) -> DeviceSetup:
    """How a model runs on a device. StartupError for a model that no kernel was made for."""
    on_gpu = device.kind is DeviceKind.CUDA
    kernels = find_kernel_configs(model.config, model.dtype, device)
    num_sms = _INTERPRETER_SMS
    if on_gpu:
        num_sms = torch.cuda.get_device_properties(device.torch_device).multi_processor_count
    return DeviceSetup(
        device=device.torch_device,
        kernels=kernels,
        limits=limits,
        grid=resident_grid(kernels.decode, num_sms),
        deterministic=deterministic,
        graphs=DecodeGraphs(decode_buckets(limits.max_rows), cuda_capture()) if on_gpu and graphs else None,
    )


def assemble(model: Model, setup: DeviceSetup, info: EngineInfo) -> ModelRunner:
    """Forward pass and sampler on the device, by the Triton kernels."""
    if setup.deterministic and setup.device.type == "cuda":
        _make_products_deterministic()
    ops = triton_ops()
    sampler = DeviceSampler(model.config.vocab_size, model.num_tokens, setup.device, ops)
    return ModelRunner(DeviceForward(model, ops, setup), sampler, info)


def _make_products_deterministic() -> None:
    """For this whole process: cuBLAS may not sum parts of a product in 16 bits, which torch's defaults allow, and must
    have been kept from splitting products. StartupError if it was not."""
    if cublas_may_split():
        raise StartupError(
            "--deterministic on a GPU needs CUBLAS_WORKSPACE_CONFIG=:16:8 and CUBLASLT_WORKSPACE_SIZE=1 in this "
            "process's environment"
        )
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
