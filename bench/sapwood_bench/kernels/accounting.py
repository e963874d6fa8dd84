"""Bytes that must move and operations that must be done: what a time is held against."""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_bench.kernels.cases import AttentionCase

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""By torch's name of a dtype."""
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The least that one call costs, whatever the kernel."""

    num_bytes: int
    """Read and written: keys and values once for each distinct slot of a page, queries, outputs."""
    flops: int
    """`4 * num_heads * head_dim` for each pair of a query and a key that it sees: two products, multiply and add."""
    kv_bytes: int
    """Of `num_bytes`, keys and values."""


def attention_cost(case: AttentionCase) -> Cost:
    """Of a case without a window: every key up to its own position is seen."""
    heads = case.heads
    num_queries = len(case.decode) + sum(chunk.num_queries for chunk in case.prefill)
    pairs = sum(case.decode) + sum(chunk.pairs for chunk in case.prefill)
    per_key = 2 * heads.num_kv_heads * heads.head_dim * ITEM_BYTES[case.kv_dtype or case.dtype]
    kv_bytes = distinct_keys(case) * per_key
    q_and_out = 2 * num_queries * heads.num_heads * heads.head_dim * ITEM_BYTES[case.dtype]
    return Cost(num_bytes=kv_bytes + q_and_out, flops=4 * heads.num_heads * heads.head_dim * pairs, kv_bytes=kv_bytes)


def distinct_keys(case: AttentionCase) -> int:
    """Slots of pages that hold a key: those of a shared prefix count once."""
    saved = sum((shared.num_rows - 1) * shared.num_keys for shared in case.shared)
    return sum(case.decode) + sum(chunk.num_keys for chunk in case.prefill) - saved


def partial_bytes(case: AttentionCase, split_size: int) -> int:
    """What split decode writes and its merge reads again, beyond `Cost.num_bytes`: for each split of a row and each
    head an accumulator of head_dim, a maximum and a total, in fp32."""
    num_partials = sum(-(-keys // split_size) for keys in case.decode)
    return 2 * _FP32 * num_partials * case.heads.num_heads * (case.heads.head_dim + 2)


def rope_kv_store_bytes(num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """K1 in bf16: qkv, cosines and sines, slots; queries, keys and values."""
    qkv = (num_heads + 2 * num_kv_heads) * head_dim * 2
    return num_rows * (qkv + head_dim * _FP32 + 8 + qkv)


def add_rms_norm_bytes(num_rows: int, hidden: int) -> int:
    """K5 in bf16: x, the fp32 residual, the weight; the residual and the norm."""
    return num_rows * hidden * (2 + _FP32 + _FP32 + 2) + hidden * _FP32


def silu_mul_bytes(num_rows: int, intermediate: int) -> int:
    """K6 in bf16: gates and ups; their product."""
    return num_rows * intermediate * 3 * 2


def logits_prepare_bytes(num_rows: int, vocabulary: int, num_hidden: int) -> int:
    """K7 with a mask and no penalties: a bit for each token of each row, and the `num_hidden` fp32 logits that become
    minus infinity. (Those that stay are not touched.)"""
    return num_rows * -(-vocabulary // 32) * 4 + num_hidden * _FP32


def sample_bytes(num_rows: int, vocabulary: int) -> int:
    """K8: fp32 logits once (a search that passes over them again finds them in the cache), an id."""
    return num_rows * (vocabulary * _FP32 + 8)
