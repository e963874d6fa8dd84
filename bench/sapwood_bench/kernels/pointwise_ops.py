"""The ops of a layer besides attention and products, as trials."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sapwood_bench.kernels.accounting import add_rms_norm_bytes, rope_kv_store_bytes, silu_mul_bytes
from sapwood_bench.kernels.trials import OpSizes, Trial
from sapwood_kernels import reference
from sapwood_kernels.add_rms_norm import add_rms_norm
from sapwood_kernels.rope_kv_store import rope_kv_store
from sapwood_kernels.silu_mul import silu_mul

_EPS = 1e-5
_PAGE_SIZE = 16


def rope_kv_store_trial(num_rows: int, sizes: OpSizes, generator: torch.Generator, dtype: torch.dtype) -> Trial:
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


def add_rms_norm_trial(num_rows: int, sizes: OpSizes, generator: torch.Generator, dtype: torch.dtype) -> Trial:
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


def silu_mul_trial(num_rows: int, sizes: OpSizes, generator: torch.Generator, dtype: torch.dtype) -> Trial:
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
