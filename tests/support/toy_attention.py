"""A small attention kernel with an unmasked and a masked loop, for tests of the compile gate.

Each way to spoil it is a parameter of `launch_toy`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sapwood_kernels.fold import online_softmax


@triton.jit
def _toy(
    query: tl.tensor,
    key: tl.tensor,
    out: tl.tensor,
    num_keys: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    columns = tl.arange(0, head_dim)
    where = tl.arange(0, rows)[:, None] * stride + columns[None, :]
    q = tl.load(query + where)
    maximum = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, head_dim], tl.float32)
    whole = num_keys // tile * tile
    for start in tl.range(0, whole, tile):
        keys = start + tl.arange(0, tile)
        k = tl.load(key + keys[:, None] * stride + columns[None, :])
        weights, maximum, total, acc = online_softmax(tl.dot(q, k.T) * scale, maximum, total, acc)
        acc = tl.dot(weights.to(k.dtype), k, acc)
    for start in tl.range(whole, num_keys, tile):
        keys = start + tl.arange(0, tile)
        seen = keys < num_keys
        k = tl.load(key + keys[:, None] * stride + columns[None, :], mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(q, k.T) * scale, float("-inf"))
        weights, maximum, total, acc = online_softmax(scores, maximum, total, acc)
        acc = tl.dot(weights.to(k.dtype), k, acc)
    tl.store(out + where, (acc / total[:, None]).to(out.dtype.element_ty))


def launch_toy(
    rows: int = 128, head_dim: int = 128, *, stride: int | None = None, num_stages: int = 3, fusion: bool = False
) -> None:
    """Attention of `rows` queries over keys that are also the values, in bf16, by tiles of 64 keys.

    A `stride` that isn't a multiple of 16 costs the wide loads; 256 dimensions at 128 rows on sm_80 cost spills;
    `fusion` lets the compiler contract products and differences.
    """
    tensor = torch.zeros(rows, stride or head_dim, dtype=torch.bfloat16)
    _toy[(1,)](
        tensor,
        tensor,
        tensor.clone(),
        100,
        tensor.stride(0),
        0.125,
        rows=rows,
        head_dim=head_dim,
        tile=64,
        num_warps=8 if rows == 128 else 4,
        num_stages=num_stages,
        enable_fp_fusion=fusion,
    )
