"""K2: causal attention of many queries per sequence over keys and values in pages (FlashAttention-2; Dao, 2023).

A program computes `BLOCK_M` rows: the heads of one key-value head's group, padded to a power of two, for consecutive
queries of one sequence. So each tile of keys is read once for the whole group, and tiles have enough rows for Hopper's
matrix instructions, which need 64.

A row's bits depend on nothing but its query, its keys and the config:
- Tiles of keys start at multiples of `BLOCK_N` from position 0, whatever chunk of a prompt is computed, and are folded
  in ascending order. A tile that a row sees nothing of changes no bit of its state, so the rows beside it don't matter.
- Keys and values are read from pages, fresh ones as well.
- All loops run one body. It masks scores, or not, between the same arithmetic operations.

Loops: tiles that some row sees in part, at a window's edge; tiles that all rows see whole; tiles on the diagonal. Only
the first and the last compute masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention_check import check_attention, check_device
from sapwood_kernels.config_table import padded_group
from sapwood_kernels.fold import LOG2_E, log2_scores, online_softmax
from sapwood_kernels.interpreted import must_upcast
from sapwood_kernels.prefill_work import PrefillWork, queries_per_block
from sapwood_kernels.values import UNIT_SCALES, AttentionRule, KVScales, PagedBatch


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    work: PrefillWork,
    rule: AttentionRule,
    scales: KVScales = UNIT_SCALES,
) -> Tensor:
    """`softmax(q k^T * scale) v` per query over the keys it sees; see `reference_attention.paged_prefill`.

    q [num_tokens, num_heads, head_dim], each row in exactly one sequence; kv [num_pages, 2, num_kv_heads, page_size,
    head_dim], of q's dtype or e4m3 -> [num_tokens, num_heads, head_dim], contiguous. A query that sees no key gives
    zeros; a row of q that no item of `work` covers is left as the memory was.

    Raises ValueError for what can't be; see `attention_check` for what is checked where.
    """
    check_attention(q, kv, batch, rule, work.arch)
    check_device({"items": work.items, "count": work.count}, q.device)
    if q.device.type == "cpu" and not 0 <= int(work.count) <= work.num_blocks:
        raise ValueError(f"count is {int(work.count)}; accepted: 0 to num_blocks, {work.num_blocks}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if work.num_blocks:
        _launch(out, q, kv, batch, work, rule, scales)
    return out


def _launch(
    out: Tensor, q: Tensor, kv: Tensor, batch: PagedBatch, work: PrefillWork, rule: AttentionRule, scales: KVScales
) -> None:
    num_kv_heads, page_size, head_dim = kv.shape[2:]
    group = q.shape[1] // num_kv_heads
    _paged_prefill[(work.num_blocks, num_kv_heads)](
        q,
        kv,
        out,
        batch.block_table,
        batch.num_keys,
        batch.first_query,
        work.items,
        work.count,
        rule.sinks,
        rule.scale * LOG2_E * scales.key,
        scales.value,
        *q.stride()[:2],
        *out.stride()[:2],
        *kv.stride()[:4],
        batch.block_table.stride(0),
        GROUP=group,
        PADDED_GROUP=padded_group(group),
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size,
        BLOCK_Q=queries_per_block(work.config, group),
        BLOCK_N=work.config.block_n,
        WINDOW=rule.window or 0,
        SOFTCAP=rule.softcap or 0.0,
        UPCAST=must_upcast(q, kv),
        num_warps=work.config.num_warps,
        num_stages=work.config.num_stages,
        maxnreg=work.config.max_registers,
        enable_fp_fusion=False,
    )


@triton.jit
def _paged_prefill(
    q: tl.tensor,
    kv: tl.tensor,
    out: tl.tensor,
    block_table: tl.tensor,
    num_keys: tl.tensor,
    first_query: tl.tensor,
    items: tl.tensor,
    count: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_head: tl.tensor,
    stride_page: tl.tensor,
    stride_kind: tl.tensor,
    stride_kv_head: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    item = tl.program_id(0).to(tl.int64)
    if item >= tl.load(count):
        return
    sequence = tl.load(items + 2 * item).to(tl.int64)
    first = tl.load(items + 2 * item + 1) * BLOCK_Q
    kv_head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    query = first + tl.arange(0, BLOCK_Q * PADDED_GROUP) // PADDED_GROUP
    head = tl.arange(0, BLOCK_Q * PADDED_GROUP) % PADDED_GROUP
    q_head = kv_head * GROUP + head

    token, row_mask = _place_rows(first_query + sequence, query, head < GROUP, dims < HEAD_DIM)
    where = token * stride_q_token + q_head[:, None] * stride_q_head + dims[None, :]
    q_tile = tl.load(q + where, mask=row_mask, other=0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)

    # Some row sees the keys `[begin, end)`; by causality, all rows see those before `diagonal`.
    sequence_keys = tl.load(num_keys + sequence)
    context = sequence_keys - (tl.load(first_query + sequence + 1) - tl.load(first_query + sequence))
    position = context + query
    end = tl.maximum(tl.minimum(context + first + BLOCK_Q, sequence_keys), 0)
    diagonal = tl.maximum(context + first + 1, 0) // BLOCK_N * BLOCK_N
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context + first + 1 - WINDOW, 0)

    maximum = tl.full([BLOCK_Q * PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * PADDED_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_Q * PADDED_GROUP, PADDED_DIM], tl.float32)
    if sinks is not None:
        # A key of weight exp(sink) whose value is zero.
        maximum = tl.load(sinks + q_head, mask=head < GROUP, other=0.0) * 1.4426950408889634
        total = total + 1.0

    table = block_table + sequence * stride_table
    head_kv = kv + kv_head * stride_kv_head
    whole = 0
    if WINDOW > 0:
        # Tiles from `whole` on start inside the last row's window, and so inside all rows'.
        whole = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N, diagonal)
        for start in tl.range(begin // BLOCK_N * BLOCK_N, whole, BLOCK_N):
            maximum, total, acc = _attend_tile(
                start, begin, end, maximum, total, acc, q_tile, position, dims, table, head_kv, scale,
                stride_page, stride_kind, stride_slot,
                HEAD_DIM, PAGE_SIZE, BLOCK_N, False, WINDOW, SOFTCAP, UPCAST,
            )  # fmt: skip
    for start in tl.range(whole, diagonal, BLOCK_N):
        maximum, total, acc = _attend_tile(
            start, begin, end, maximum, total, acc, q_tile, position, dims, table, head_kv, scale,
            stride_page, stride_kind, stride_slot,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, False, 0, SOFTCAP, UPCAST,
        )  # fmt: skip
    # A window of a block of queries and a tile, or more, has no edge in a tile on the diagonal.
    EDGE: tl.constexpr = WINDOW if WINDOW < BLOCK_Q + BLOCK_N else 0
    for start in tl.range(diagonal, end, BLOCK_N):
        maximum, total, acc = _attend_tile(
            start, begin, end, maximum, total, acc, q_tile, position, dims, table, head_kv, scale,
            stride_page, stride_kind, stride_slot,
            HEAD_DIM, PAGE_SIZE, BLOCK_N, True, EDGE, SOFTCAP, UPCAST,
        )  # fmt: skip

    # Without a key, total and acc are zero, and so is the output.
    factor = value_scale / tl.where(total == 0.0, 1.0, total)
    token, row_mask = _place_rows(first_query + sequence, query, head < GROUP, dims < HEAD_DIM)
    where = token * stride_out_token + q_head[:, None] * stride_out_head + dims[None, :]
    tl.store(out + where, (acc * factor[:, None]).to(out.dtype.element_ty), mask=row_mask)


@triton.jit
def _place_rows(
    first_query: tl.tensor, query: tl.tensor, is_head: tl.tensor, is_dim: tl.tensor
) -> tuple[tl.tensor, ...]:
    """Where rows lie in q and out: int64 tokens [rows, 1], and the mask of what is real [rows, dims].

    Volatile: computed again for the output, for what is kept over the loops takes registers that sm_80 doesn't have (64
    bytes a thread were spilt at head dim 128, with a window and a softcap).
    """
    first_row = tl.load(first_query, volatile=True)
    num_queries = tl.load(first_query + 1, volatile=True) - first_row
    token = (first_row + query).to(tl.int64)
    return token[:, None], ((query < num_queries) & is_head)[:, None] & is_dim[None, :]


@triton.jit
def _attend_tile(
    start: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    q_tile: tl.tensor,
    position: tl.tensor,
    dims: tl.tensor,
    table: tl.tensor,
    head_kv: tl.tensor,
    scale: tl.tensor,
    stride_page: tl.tensor,
    stride_kind: tl.tensor,
    stride_slot: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The rows' state after the keys `[start, start + BLOCK_N)`, of which they see those before `end`.

    CAUSAL: only up to each row's position. WINDOW, if not 0: only so many, and those before `begin` are not read.
    Values that are not read are zero: a weight of zero times NaN, which pages may hold, would be NaN.
    """
    MASKED: tl.constexpr = CAUSAL or WINDOW > 0
    keys = start + tl.arange(0, BLOCK_N)
    is_key = keys < end
    if WINDOW > 0:
        is_key = is_key & (keys >= begin)
    page = tl.load(table + keys // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
    slot = (keys % PAGE_SIZE).to(tl.int64)
    where = (page * stride_page + slot * stride_slot)[:, None] + dims[None, :]
    mask = (dims < HEAD_DIM)[None, :]
    if MASKED:
        mask = mask & is_key[:, None]
    k = tl.load(head_kv + where, mask=mask, other=0.0)
    v = tl.load(head_kv + stride_kind + where, mask=mask, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    k = k.to(q_tile.dtype)
    v = v.to(q_tile.dtype)
    scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        scores = log2_scores(scores, scale, SOFTCAP)
        scale = 1.0
    if CAUSAL:
        scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
    if WINDOW > 0:
        scores = tl.where(keys[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
    weights, maximum, total, acc = online_softmax(scores, maximum, total, acc, scale)
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return maximum, total, acc
