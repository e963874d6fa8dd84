"""Decode attention: one query a sequence over its keys in pages, split by split.

A program takes one item of the work after the other, each for one key-value head: one split of keys and the rows that
attend to it. Rows and the query heads of their groups make row blocks of BLOCK_M, the same whether an item has one row
or many: so a row's partial has the same bits alone and in a group. A wide item carries several row blocks over each
loaded tile; it has the same tiles, and the same shape of matrix products, as an ordinary one. How many is what fits
the registers: at head dim 128 a row block's queries take 32 of a thread's, its sums 16, so two fit and four spill.

A tile's page ids are loaded before its keys, which takes a stage of the pipeline of its own: with 5 stages two tiles of
keys and values are under way, with 3 or 4 only one.

All tiles run in one masked loop. Reading keys takes longer than masking them, and with one loop there is no other
whose bits could differ.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention_check import check_attention
from sapwood_kernels.config_table import padded_group
from sapwood_kernels.decode_work import DecodeWork, check_work
from sapwood_kernels.fold import LOG2_E, log2_scores, online_softmax
from sapwood_kernels.interpreted import must_upcast
from sapwood_kernels.partials import Partials, check_partials
from sapwood_kernels.values import AttentionRule, KVScales, PagedBatch


def paged_decode(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    work: DecodeWork,
    rule: AttentionRule,
    scales: KVScales,
    partials: Partials,
) -> Partials:
    """The partials of every row over each of its splits that the rule's window leaves; see `Partials`.

    q [num_rows, num_heads, head_dim], row i the last token of sequence i; kv [num_pages, 2, num_kv_heads, page_size,
    head_dim], like q or e4m3. `work` was built from the batch's own tables and lengths. Sinks are left to
    `merge_splits`. Returns `partials`; those that the window hides are not written.
    """
    check_attention(q, kv, batch, rule, work.layout.arch)
    check_work(work, q, kv, batch, rule)
    check_partials(partials, work.layout.capacity, q.shape[1], q.shape[2], q.device)
    _launch(q, kv, batch, work, rule, scales, partials)
    return partials


def _launch(
    q: Tensor,
    kv: Tensor,
    batch: PagedBatch,
    work: DecodeWork,
    rule: AttentionRule,
    scales: KVScales,
    partials: Partials,
) -> None:
    config = work.layout.config
    lists = [(work.items, work.grid.num_programs, 1, config.max_registers)]
    if work.wide_items is not None:
        lists.append((work.wide_items, work.grid.wide_programs, config.row_blocks, config.max_wide_registers))
    for items, num_programs, row_blocks, max_registers in lists:
        _paged_decode[(num_programs,)](
            q,
            kv,
            batch.block_table,
            batch.num_keys,
            items,
            *(work.rows, work.counts, work.first_partial),
            *(partials.maximum, partials.total, partials.acc),
            *(q.stride(0), q.stride(1), kv.stride(0), kv.stride(2), kv.stride(3), batch.block_table.stride(0)),
            *(partials.maximum.stride(0), partials.acc.stride(0), partials.acc.stride(1)),
            kv.shape[2],
            rule.scale * scales.key * LOG2_E,
            scales.value,
            # The same for every layer, and as a constant it is part of a load's instruction: ten registers fewer.
            VALUE_STRIDE=kv.stride(1),
            GROUP=work.layout.group,
            PADDED_GROUP=padded_group(work.layout.group),
            PAGE_SIZE=kv.shape[3],
            HEAD_DIM=kv.shape[4],
            BLOCK_D=triton.next_power_of_2(kv.shape[4]),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SPLIT_SIZE=config.split_size,
            ROW_BLOCKS=row_blocks,
            WINDOW=rule.window or 0,
            SOFTCAP=rule.softcap or 0.0,
            UPCAST=must_upcast(q, kv),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=max_registers,
            enable_fp_fusion=False,
        )


@triton.jit
def _paged_decode(
    q: tl.tensor,
    kv: tl.tensor,
    block_table: tl.tensor,
    num_keys: tl.tensor,
    items: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    first_partial: tl.tensor,
    partial_maximum: tl.tensor,
    partial_total: tl.tensor,
    partial_acc: tl.tensor,
    q_row_stride: tl.tensor,
    q_head_stride: tl.tensor,
    page_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    table_stride: tl.tensor,
    maximum_stride: tl.tensor,
    acc_stride: tl.tensor,
    acc_head_stride: tl.tensor,
    num_kv_heads: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    VALUE_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """See `paged_decode`. Grid: (programs). Line `i * PADDED_GROUP + h` of a row block is its row i and the group's
    head h."""
    compute: tl.constexpr = tl.float32 if UPCAST else q.dtype.element_ty
    dims = tl.arange(0, BLOCK_D)
    in_head = (dims < HEAD_DIM)[None, :]
    row_of_block = tl.arange(0, BLOCK_M) // PADDED_GROUP
    head_of_group = tl.arange(0, BLOCK_M) % PADDED_GROUP
    num_jobs = tl.load(counts + (0 if ROW_BLOCKS == 1 else 1)) * num_kv_heads
    for job in tl.range(tl.program_id(0), num_jobs, tl.num_programs(0)):
        item = items + (job // num_kv_heads).to(tl.int64) * 4
        kv_head = (job % num_kv_heads).to(tl.int64)
        row_start = tl.load(item)
        n_rows = tl.load(item + 1)
        table = block_table + tl.load(item + 2).to(tl.int64) * table_stride
        split = tl.load(item + 3)
        heads = kv_head * GROUP + head_of_group
        keys_of_head = kv + kv_head * kv_head_stride

        # What each row block knows of its rows. The item's tiles go from the first key that one of them sees to the
        # last one; a tile that is masked whole for a row changes none of its bits.
        first_key = (split + 1) * SPLIT_SIZE
        end_key = split * SPLIT_SIZE
        queries: tl.tuple = ()
        row_ids: tl.tuple = ()
        row_keys: tl.tuple = ()
        maximum: tl.tuple = ()
        total: tl.tuple = ()
        acc: tl.tuple = ()
        for block in tl.static_range(ROW_BLOCKS):
            place = block * (BLOCK_M // PADDED_GROUP) + row_of_block
            in_item = place < n_rows
            row = tl.load(rows + row_start.to(tl.int64) + place, mask=in_item, other=0).to(tl.int64)
            their_keys = tl.load(num_keys + row, mask=in_item, other=0)
            where_q = row * q_row_stride + heads * q_head_stride
            in_q = (in_item & (head_of_group < GROUP))[:, None] & in_head
            queries += (tl.load(q + where_q[:, None] + dims[None, :], mask=in_q, other=0.0).to(compute),)
            row_ids += (row,)
            row_keys += (their_keys,)
            maximum += (tl.full([BLOCK_M], float("-inf"), tl.float32),)
            total += (tl.zeros([BLOCK_M], tl.float32),)
            acc += (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
            end_key = tl.maximum(end_key, tl.max(their_keys, 0))
            first_key = tl.minimum(first_key, tl.min(tl.where(in_item, their_keys - WINDOW, first_key), 0))
        end_key = tl.minimum(end_key, (split + 1) * SPLIT_SIZE)
        first_key = tl.maximum(first_key, split * SPLIT_SIZE) if WINDOW else split * SPLIT_SIZE

        for start in tl.range(first_key // BLOCK_N * BLOCK_N, end_key, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            # What isn't loaded is 0: pages outside may hold anything, and 0 * NaN would be NaN.
            visible = (keys >= first_key) & (keys < end_key)
            pages = tl.load(table + keys // PAGE_SIZE, mask=visible, other=0).to(tl.int64)
            where_k = pages * page_stride + (keys % PAGE_SIZE).to(tl.int64) * slot_stride
            its_keys = keys_of_head + where_k[:, None] + dims[None, :]
            k = tl.load(its_keys, mask=visible[:, None] & in_head, other=0.0).to(compute)
            v = tl.load(its_keys + VALUE_STRIDE, mask=visible[:, None] & in_head, other=0.0)
            new_maximum: tl.tuple = ()
            new_total: tl.tuple = ()
            new_acc: tl.tuple = ()
            for block in tl.static_range(ROW_BLOCKS):
                products = tl.dot(queries[block], tl.trans(k), input_precision="ieee")
                seen = keys[None, :] < row_keys[block][:, None]
                if WINDOW:
                    seen = seen & (keys[None, :] >= row_keys[block][:, None] - WINDOW)
                scores = tl.where(seen, log2_scores(products, scale, SOFTCAP), float("-inf"))
                weights, its_maximum, its_total, its_acc = online_softmax(
                    scores, maximum[block], total[block], acc[block]
                )
                # Converted here, not at the load: e4m3 takes eight registers fewer, and spills none.
                its_acc = tl.dot(weights.to(compute), v.to(compute), its_acc, input_precision="ieee")
                new_maximum += (its_maximum,)
                new_total += (its_total,)
                new_acc += (its_acc,)
            maximum = new_maximum
            total = new_total
            acc = new_acc

        for block in tl.static_range(ROW_BLOCKS):
            row_is_real = block * (BLOCK_M // PADDED_GROUP) + row_of_block < n_rows
            # Nothing of an item that the window hides: the merge doesn't look there.
            real = row_is_real & (head_of_group < GROUP) & (first_key < end_key)
            number = tl.load(first_partial + row_ids[block], mask=row_is_real, other=0).to(tl.int64) + split
            tl.store(partial_maximum + number * maximum_stride + heads, maximum[block], mask=real)
            tl.store(partial_total + number * maximum_stride + heads, total[block], mask=real)
            its_acc_at = partial_acc + (number * acc_stride + heads * acc_head_stride)[:, None] + dims[None, :]
            tl.store(its_acc_at, acc[block] * value_scale, mask=real[:, None] & in_head)
