"""`python -m sapwood_server.model.report`: what a start would decide here, from a configuration as JSON on stdin."""

from __future__ import annotations

import sys

import msgspec
import torch

from sapwood_server.config import ServerConfig, onednn_isa_limit
from sapwood_server.errors import StartupError
from sapwood_server.model.dtype import choose_cpu_dtype, read_cpu_flags
from sapwood_server.model.load import plan_load
from sapwood_server.model.weight_plan import WeightPlan
from sapwood_server.values.report import ComputeReport


def compute_report(config: ServerConfig) -> ComputeReport:
    """Device, dtype and memory plan. A start that would fail is told in `problem`; nothing of a weight is read.

    Raises StartupError for dtype `auto` if the machine does not say what its CPU can do.
    """
    dtype = choose_cpu_dtype(config.dtype, read_cpu_flags(), onednn_isa_limit())
    report = ComputeReport(
        torch=str(torch.__version__),
        device="cpu",
        device_detail=f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        dtype=dtype.name,
        dtype_reason=dtype.reason,
        packed=_packed(dtype.dtype, None),
    )
    try:
        plan = plan_load(config)
    except StartupError as error:
        return msgspec.structs.replace(report, problem=str(error))
    return msgspec.structs.replace(
        report,
        architecture=plan.config.architecture,
        max_model_len=plan.max_model_len,
        packed=_packed(dtype.dtype, plan.weights),
        weight_bytes=plan.weights.num_bytes,
        kv_bytes_per_token=plan.kv.bytes_per_token,
        kv_bytes=plan.kv.num_bytes,
        kv_tokens=(plan.kv.num_pages - 1) * plan.kv.page_size,
    )


def _packed(dtype: torch.dtype, weights: WeightPlan | None) -> str:
    """Whether decode takes a checkpoint's own 4-bit weights, and what this torch or machine lacks."""
    if dtype != torch.bfloat16:
        return "no: they need bfloat16"
    if weights is None:
        return "unknown"
    return "; ".join(("yes, where the checkpoint has them" if weights.forms.int4 else "no", *weights.problems))


if __name__ == "__main__":
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    sys.stdout.buffer.write(msgspec.json.encode(compute_report(config)))
