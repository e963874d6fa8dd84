"""The ops around attention, all bound by memory: how close to a plain copy they come, beside torch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from sapwood_bench.kernels.device import Device
from sapwood_bench.kernels.logit_ops import logits_prepare_trial, sample_trial
from sapwood_bench.kernels.oracle import relative_error
from sapwood_bench.kernels.pointwise_ops import add_rms_norm_trial, rope_kv_store_trial, silu_mul_trial
from sapwood_bench.kernels.results import Check, Failure, Row, as_rivals
from sapwood_bench.kernels.timing import ROUNDS, Contender, rotations, time_contenders
from sapwood_bench.kernels.trials import LLAMA_8B_SIZES, TINY_SIZES, Make, Trial

NUM_ROWS = (1, 64, 2048)
LOGIT_ROWS = (1, 64)
"""Of ops on logits, whose rows are sequences."""
_ERROR = 6e-3
"""In bf16, relative to the formula in fp32: one rounding of the result is 2 ** -9 at most, 0.2 %."""

OPS: dict[str, Make] = {
    "rope_kv_store": rope_kv_store_trial,
    "add_rms_norm": add_rms_norm_trial,
    "silu_mul": silu_mul_trial,
    "logits_prepare": logits_prepare_trial,
    "sample": sample_trial,
}
ON_LOGITS = ("logits_prepare", "sample")


def time_op(name: str, num_rows: int, device: Device, rounds: int = ROUNDS) -> tuple[Row, Check]:
    """The op's row of the table, with the check against the formula that came first."""
    sizes = TINY_SIZES if device.dry else LLAMA_8B_SIZES
    dtype = torch.float16 if device.dry else torch.bfloat16  # the interpreter can't compute in bf16
    num_rows = min(num_rows, 3) if device.dry else num_rows
    make = OPS[name]

    def trial(seed: int) -> Trial:
        return make(num_rows, sizes, torch.Generator(device.torch_device).manual_seed(seed), dtype)

    first = trial(0)
    wanted = first.wanted()
    found = first.ours()
    if not isinstance(found, tuple):
        raise TypeError(f"{name} gave {type(found).__name__}, not its results")
    error = max(_error(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    copies = 1 if device.dry else rotations(first.num_bytes, device.l2_bytes, most=64)
    trials = [first, *(trial(seed) for seed in range(1, copies))]
    contenders = [Contender("sapwood", [each.ours for each in trials])]
    contenders += [Contender(rival, [each.rivals[rival] for each in trials]) for rival in first.rivals]
    times = time_contenders(contenders, device.prepare, rounds)
    ours = times.pop("sapwood")
    if isinstance(ours, Failure):
        raise RuntimeError(f"{name}: {ours.reason}")
    label = f"{name}, {num_rows} rows"
    row = Row(table="pointwise", name=label, us=ours, num_bytes=first.num_bytes, error=error, rivals=as_rivals(times))
    return row, Check(
        name=f"{label}, against its formula",
        problem="" if error <= _ERROR else f"differs by {error:.2e} of its norm; accepted: {_ERROR:.0e}",
    )


def _error(found: Tensor, wanted: Tensor) -> float:
    """Relative, where both are finite; infinite if one is where the other isn't. Of ids, the share that differs."""
    if not found.is_floating_point():
        return float((found != wanted).float().mean())
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(found), finite):
        return float("inf")
    return relative_error(found[finite].float(), wanted[finite].double())
