"""Bytes and operations, to exact numbers."""

from __future__ import annotations

import pytest
import torch

from sapwood_bench.kernels import accounting
from sapwood_bench.kernels.accounting import attention_cost, distinct_keys, partial_bytes
from sapwood_bench.kernels.cases import (
    LLAMA_8B,
    AttentionCase,
    Chunk,
    Heads,
    SharedRows,
    decode_cases,
    prefill_cases,
    shared_cases,
    tiny,
)
from sapwood_bench.kernels.inputs import NO_PAGE, PhaseTensors, make_inputs

MIXED = AttentionCase(
    name="mixed",
    heads=Heads("few", 6, 2, 64),
    dtype="float16",
    decode=(70, 64, 33),
    prefill=(Chunk(5, 20),),
    shared=(SharedRows(0, 2, 64),),
)


def test_decode_moves_keys_queries_and_outputs_once() -> None:
    cost = attention_cost(AttentionCase(name="64 x 4k", decode=(4096,) * 64))
    assert cost.kv_bytes == 64 * 4096 * 2 * 8 * 128 * 2 == 2**30
    assert cost.num_bytes == 2**30 + 2 * 64 * 32 * 128 * 2
    assert cost.flops == 4 * 32 * 128 * 64 * 4096


def test_a_prompt_costs_half_of_its_square() -> None:
    cost = attention_cost(AttentionCase(name="1 x 8k", prefill=(Chunk(8192, 8192),)))
    assert cost.flops == 4 * 32 * 128 * (8192 * 8193 // 2)
    assert cost.num_bytes == 8192 * (2 * 8 + 2 * 32) * 128 * 2


@pytest.mark.parametrize("chunk", [Chunk(1, 1), Chunk(1, 9), Chunk(5, 20), Chunk(20, 20)])
def test_pairs_are_those_that_causality_leaves(chunk: Chunk) -> None:
    first = chunk.num_keys - chunk.num_queries
    assert chunk.pairs == sum(first + query + 1 for query in range(chunk.num_queries))


def test_keys_of_8_bits_count_one_byte_and_queries_two() -> None:
    case = AttentionCase(name="e4m3", decode=(100,), kv_dtype="float8_e4m3fn")
    assert attention_cost(case).num_bytes == 100 * 2 * 8 * 128 + 2 * 32 * 128 * 2


@pytest.mark.parametrize("case", [MIXED, *map(tiny, (*decode_cases(), *prefill_cases(), *shared_cases()))])
def test_keys_count_once_for_each_slot_of_a_page(case: AttentionCase) -> None:
    """Against the block tables that the case is given."""
    inputs = make_inputs(case, torch.device("cpu"))

    def slots(part: PhaseTensors | None) -> set[tuple[int, int]]:
        if part is None:
            return set()
        lengths = enumerate(part.num_keys.tolist())
        size = case.page_size
        return {
            (int(part.block_table[row, key // size]), key % size) for row, length in lengths for key in range(length)
        }

    read = slots(inputs.decode) | slots(inputs.prefill)
    assert all(0 < page < NO_PAGE for page, _ in read)
    assert distinct_keys(case) == len(read)


def test_partials_are_written_and_read() -> None:
    case = AttentionCase(name="partials", decode=(256, 257, 0))
    assert partial_bytes(case, 256) == 2 * 4 * (1 + 2) * LLAMA_8B.num_heads * (128 + 2)


def test_pointwise_bytes() -> None:
    assert accounting.rope_kv_store_bytes(3, 32, 8, 128) == 3 * (48 * 128 * 2 + 128 * 4 + 8 + 48 * 128 * 2)
    assert accounting.add_rms_norm_bytes(3, 4096) == 3 * 4096 * 12 + 4096 * 4
    assert accounting.silu_mul_bytes(3, 14336) == 3 * 14336 * 6
    assert accounting.logits_prepare_bytes(2, 100, 30) == 2 * 4 * 4 + 30 * 4
    assert accounting.sample_bytes(2, 100) == 2 * (400 + 8)
