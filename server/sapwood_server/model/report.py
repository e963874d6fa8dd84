"""`python -m sapwood_server.model.report`: what a start would decide here, from a configuration as JSON on stdin."""

from __future__ import annotations

import sys

import msgspec
import torch

from sapwood_server.config import ServerConfig
from sapwood_server.errors import StartupError
from sapwood_server.model.devices import DeviceKind, choose_device, read_device_facts
from sapwood_server.model.load_plan import choose_dtype, plan_load
from sapwood_server.model.weight_plan import WeightPlan
from sapwood_server.values.report import ComputeReport


def compute_report(config: ServerConfig) -> ComputeReport:
    """Device, dtype and memory plan. A start that would fail is told in `problem`; nothing of a weight is read."""
    torch_version = str(torch.__version__)
    try:
        device = choose_device(config.device, read_device_facts())
        dtype = choose_dtype(config.dtype, device.kind)
    except StartupError as error:
        return _undecided(config, torch_version, str(error))
    report = ComputeReport(
        torch=torch_version,
        device=device.kind.value,
        device_detail=device.detail,
        device_reason=device.reason,
        dtype=dtype.name,
        dtype_reason=dtype.reason,
        packed=_packed(device.kind, dtype.dtype, None),
    )
    try:
        plan = plan_load(config)
    except StartupError as error:
        return msgspec.structs.replace(report, problem=str(error))
    return msgspec.structs.replace(
        report,
        architecture=plan.config.architecture,
        max_model_len=plan.max_model_len,
        packed=_packed(device.kind, dtype.dtype, plan.weights),
        weight_bytes=plan.weights.num_bytes,
        kv_bytes_per_token=plan.kv.bytes_per_token,
        kv_bytes=plan.kv.num_bytes,
        kv_tokens=(plan.kv.num_pages - 1) * plan.kv.page_size,
    )


def _packed(device: DeviceKind, dtype: torch.dtype, weights: WeightPlan | None) -> str:
    """Whether decode takes a checkpoint's own 4-bit weights, and what this torch or machine lacks."""
    if device is not DeviceKind.CPU:
        return "no: a CPU's form"
    if dtype != torch.bfloat16:
        return "no: they need bfloat16"
    if weights is None:
        return "unknown"
    if weights.forms.fixed_rows:
        return "no: --deterministic takes one form of weights for every number of rows"
    return "; ".join(("yes, where the checkpoint has them" if weights.forms.int4 else "no", *weights.problems))


def _undecided(config: ServerConfig, torch_version: str, problem: str) -> ComputeReport:
    """Of a device that can't be used, or can't compute in the dtype."""
    return ComputeReport(
        torch=torch_version,
        device=config.device,
        device_detail="not decided",
        device_reason=problem,
        dtype=config.dtype,
        dtype_reason="not decided",
        packed="unknown",
        problem=problem,
    )


if __name__ == "__main__":
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    sys.stdout.buffer.write(msgspec.json.encode(compute_report(config)))
