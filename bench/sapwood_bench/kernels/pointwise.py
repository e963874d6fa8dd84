"""The ops around attention, all bound by memory: how close to a plain copy they come, beside torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_bench.kernels.accounting import add_rms_norm_bytes, rope_kv_store_bytes, silu_mul_bytes
from sapwood_bench.kernels.device import Device
from sapwood_bench.kernels.oracle import relative_error
from sapwood_bench.kernels.results import Check, Failure, Row, as_rivals
from sapwood_bench.kernels.timing import ROUNDS, Call, Contender, rotations, time_contenders
from sapwood_kernels import reference
from sapwood_kernels.add_rms_norm import add_rms_norm
from sapwood_kernels.rope_kv_store import rope_kv_store
from sapwood_kernels.silu_mul import silu_mul

NUM_ROWS = (1, 64, 2048)
_EPS = 1e-5
_PAGE_SIZE = 16
_ERROR = 6e-3
"""In bf16, relative to the formula in fp32: one rounding of the result is 2 ** -9 at most, 0.2 %."""


@dataclass(frozen=True, kw_only=True)
class OpSizes:
    """Of a model."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B_SIZES = OpSizes(hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=8, head_dim=128)
TINY_SIZES = OpSizes(hidden=64, intermediate=96, num_heads=4, num_kv_heads=2, head_dim=64)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An op on inputs of its own."""

    ours: Call
    wanted: Callable[[], Sequence[Tensor]]
    """By the plain formula, on copies."""
    rivals: dict[str, Call]
    num_bytes: int


Make = Callable[[int, OpSizes, torch.Generator, torch.dtype], Trial]


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
    error = max(relative_error(ours.float(), theirs.double()) for ours, theirs in zip(found, wanted, strict=True))
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


def _rope_kv_store(num_rows: int, sizes: OpSizes, generator: torch.Generator, dtype: torch.dtype) -> Trial:
    device = generator.device
    heads = sizes.num_heads + 2 * sizes.num_kv_heads
    qkv = torch.randn(num_rows, heads * sizes.head_dim, generator=generator, device=device).to(dtype)
    angles = torch.rand(num_rows, sizes.head_dim // 2, generator=generator, device=device) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    num_pages = 1 + -(-num_rows // _PAGE_SIZE)
    order = torch.randperm((num_pages - 1) * _PAGE_SIZE, generator=generator, device=device)
    slots = _PAGE_SIZE + order[:num_rows]
    kv = torch.zeros(num_pages, 2, sizes.num_kv_heads, _PAGE_SIZE, sizes.head_dim, dtype=dtype, device=device)

    def ours() -> tuple[Tensor, ...]:
        return rope_kv_store(qkv, cos_sin, slots, kv, None), kv

    def wanted() -> tuple[Tensor, ...]:
        stored = torch.zeros_like(kv)
        return reference.rope_kv_store(qkv, cos_sin, slots, stored, None), stored

    num_bytes = rope_kv_store_bytes(num_rows, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    return Trial(ours=ours, wanted=wanted, rivals={}, num_bytes=num_bytes)


def _add_rms_norm(num_rows: int, sizes: OpSizes, generator: torch.Generator, dtype: torch.dtype) -> Trial:
    x, residual = (torch.randn(num_rows, sizes.hidden, generator=generator, device=generator.device) for _ in range(2))
    x = x.to(dtype)
    weight = torch.rand(sizes.hidden, generator=generator, device=generator.device) + 0.5
    low_residual, low_weight, low_x = residual.to(dtype), weight.to(dtype), x.clone()

    def ours() -> tuple[Tensor, ...]:
        return add_rms_norm(x, residual, weight, _EPS), residual

    def wanted() -> tuple[Tensor, ...]:
        their_x, their_residual = x.clone(), residual.clone()
        return reference.add_rms_norm(their_x, their_residual, weight, _EPS), their_residual

    def torch_op() -> Tensor:
        # As models in torch have it: the residual in the model's dtype, 2 bytes where ours has 4.
        low_residual.add_(low_x)
        return F.rms_norm(low_residual, (sizes.hidden,), low_weight, _EPS)

    return Trial(
        ours=ours,
        wanted=wanted,
        rivals={"torch add, rms_norm": torch_op},
        num_bytes=add_rms_norm_bytes(num_rows, sizes.hidden),
    )


def _silu_mul(num_rows: int, sizes: OpSizes, generator: torch.Generator, dtype: torch.dtype) -> Trial:
    gate_up = torch.randn(num_rows, 2 * sizes.intermediate, generator=generator, device=generator.device).to(dtype)

    def torch_op() -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    return Trial(
        ours=lambda: (silu_mul(gate_up),),
        wanted=lambda: (reference.silu_mul(gate_up.float()),),
        rivals={"torch silu, mul": torch_op},
        num_bytes=silu_mul_bytes(num_rows, sizes.intermediate),
    )


OPS: dict[str, Make] = {"rope_kv_store": _rope_kv_store, "add_rms_norm": _add_rms_norm, "silu_mul": _silu_mul}
