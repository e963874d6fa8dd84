"""A step's arrays, against the same said one token at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from sapwood_server.model.kv import BlockTables, PageBounds
from sapwood_server.model.placement import PlacedRow, place_rows
from sapwood_server.model.step_inputs import NO_SLOT, StepInputs, pad_step, step_inputs
from sapwood_server.values.plan import Phase, RowPlan, StepPlan
from support.scale import scaled

NUM_PAGES = 1000


def random_plan(random_: random.Random, page_size: int, phases: Sequence[Phase]) -> StepPlan:
    """Rows of random lengths, each with all its pages new."""
    free = list(range(1, NUM_PAGES))
    random_.shuffle(free)
    rows = []
    for index, phase in enumerate(phases):
        count = 1 if phase is Phase.DECODE else random_.randint(1, 50)
        start = random_.randint(0, 100)
        pages = [free.pop() for _ in range(-(-(start + count) // page_size))]
        ids = [random_.randint(0, 300) for _ in range(count)]
        rows.append(RowPlan(sequence_id=index, token_ids=ids, start=start, phase=phase, new_pages=pages, samples=()))
    return StepPlan(step=0, rows=tuple(rows))


def placed_rows(plan: StepPlan, tables: BlockTables, page_size: int) -> list[PlacedRow]:
    return place_rows(plan, tables, PageBounds(NUM_PAGES, page_size))


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("decode_by_prefill", [False, True])
def test_every_token_has_its_id_position_slot_and_sequence(page_size: int, decode_by_prefill: bool) -> None:
    random_ = random.Random(page_size)
    for _ in range(scaled(200, 10)):
        plan = random_plan(random_, page_size, random_.choices([Phase.DECODE, Phase.PREFILL], k=random_.randint(1, 9)))
        tables = BlockTables(page_size)
        placed = placed_rows(plan, tables, page_size)
        step = step_inputs(placed, tables, page_size, decode_by_prefill=decode_by_prefill)
        rows = [*(r for r in plan.rows if r.phase is Phase.DECODE), *(r for r in plan.rows if r.phase is Phase.PREFILL)]
        tokens = [(row, offset) for row in rows for offset in range(len(row.token_ids))]
        assert step.token_ids.tolist() == [row.token_ids[offset] for row, offset in tokens]
        assert step.positions.tolist() == [row.start + offset for row, offset in tokens]
        positions = [(row, row.start + offset) for row, offset in tokens]
        slots = [row.new_pages[p // page_size] * page_size + p % page_size for row, p in positions]
        assert step.slots.tolist() == slots
        decoding = 0 if decode_by_prefill else sum(row.phase is Phase.DECODE for row in rows)
        assert (step.decode.num_sequences, step.prefill.num_sequences) == (decoding, len(rows) - decoding)
        both = [(step.decode, row) for row in range(decoding)] + [
            (step.prefill, i) for i in range(len(rows) - decoding)
        ]
        for (phase, index), row in zip(both, rows, strict=True):
            assert phase.num_keys[index] == row.start + len(row.token_ids)
            assert phase.num_queries[index] == len(row.token_ids)
            assert phase.block_table[index, : len(row.new_pages)].tolist() == list(row.new_pages)
        assert step.prefill.first_query.tolist() == [0, *np.cumsum(step.prefill.num_queries)]


def test_dtypes_are_those_of_the_kernels() -> None:
    step = decode_step(3)
    assert [a.dtype for a in (step.token_ids, step.positions, step.slots)] == [np.int64] * 3
    arrays = (step.decode.block_table, step.decode.num_keys, step.decode.num_queries, step.decode.first_query)
    assert [array.dtype for array in arrays] == [np.int32] * 4
    padded = pad_step(step, 8)
    assert [a.dtype for a in (padded.token_ids, padded.positions, padded.slots)] == [np.int64] * 3
    arrays = (padded.decode.block_table, padded.decode.num_keys, padded.decode.num_queries, padded.decode.first_query)
    assert [array.dtype for array in arrays] == [np.int32] * 4


def decode_step(num_rows: int, *, decode_by_prefill: bool = False) -> StepInputs:
    tables = BlockTables(16)
    plan = random_plan(random.Random(1), 16, [Phase.DECODE] * num_rows)
    return step_inputs(placed_rows(plan, tables, 16), tables, 16, decode_by_prefill=decode_by_prefill)


@pytest.mark.parametrize("decode_by_prefill", [False, True])
def test_padding_has_no_slot_and_no_keys(decode_by_prefill: bool) -> None:
    step = decode_step(3, decode_by_prefill=decode_by_prefill)
    padded = pad_step(step, 8)
    real, filled = (s.prefill if decode_by_prefill else s.decode for s in (step, padded))
    assert padded.num_tokens == filled.num_sequences == 8
    assert padded.slots.tolist() == [*step.slots, *[NO_SLOT] * 5]
    assert padded.token_ids.tolist() == [*step.token_ids, *[0] * 5]
    assert padded.positions.tolist() == [*step.positions, *[0] * 5]
    assert filled.num_keys.tolist() == [*real.num_keys, *[0] * 5]
    assert filled.first_query.tolist() == list(range(9))
    assert np.array_equal(filled.block_table[:3], real.block_table)
    assert not filled.block_table[3:].any()
    assert pad_step(step, 3).slots.tolist() == step.slots.tolist()


def test_what_cannot_be_padded_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens, 3 decode rows and 0 prefill rows; accepted: at most 2 rows"):
        pad_step(decode_step(3), 2)
    tables = BlockTables(16)
    for phases in ([Phase.DECODE, Phase.PREFILL], [Phase.PREFILL]):
        placed = placed_rows(random_plan(random.Random(2), 16, phases), tables, 16)
        step = step_inputs(placed, tables, 16)
        tables.release([0, 1])
        with pytest.raises(ValueError, match="rows of one token and one phase"):
            pad_step(step, 64)
