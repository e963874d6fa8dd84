"""One step's inputs as arrays on the host: built once, used by every layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sapwood_server.model.kv import BlockTables
from sapwood_server.model.placement import PlacedRow
from sapwood_server.values.plan import Phase

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

NO_SLOT = -1
"""Of a token whose key and value are stored nowhere."""


@dataclass(frozen=True)
class PhaseInputs:
    """The sequences of one phase; see `PagedBatch`."""

    block_table: IntArray
    """[num_sequences, max_pages]."""
    num_keys: IntArray
    """[num_sequences]."""
    num_queries: IntArray
    """[num_sequences]."""

    @property
    def num_sequences(self) -> int:
        return len(self.num_keys)

    @property
    def first_query(self) -> IntArray:
        """[num_sequences + 1]: the row of the phase's q with each sequence's first query, then the number of rows."""
        return np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(self.num_queries, dtype=np.int32)))


@dataclass(frozen=True)
class StepInputs:
    """The step's tokens in the order of computing: those of decode rows, one each, then those of prefill rows."""

    token_ids: LongArray
    """[num_tokens], and so positions and slots."""
    positions: LongArray
    slots: LongArray
    decode: PhaseInputs
    prefill: PhaseInputs

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def step_inputs(
    placed: Sequence[PlacedRow], tables: BlockTables, page_size: int, *, decode_by_prefill: bool = False
) -> StepInputs:
    """The inputs of placed rows, decode rows first; with `decode_by_prefill` all of them are of the prefill phase."""
    num_queries = np.array([len(item.row.token_ids) for item in placed], dtype=np.int32)
    starts = np.array([item.row.start for item in placed], dtype=np.int64)
    block_table = tables.gather([item.row.sequence_id for item in placed])
    token_ids = np.array(list(itertools.chain.from_iterable(item.row.token_ids for item in placed)), dtype=np.int64)
    sequences = np.repeat(np.arange(len(placed)), num_queries)
    first_tokens = np.cumsum(num_queries, dtype=np.int64) - num_queries
    positions = np.arange(len(token_ids)) - np.repeat(first_tokens - starts, num_queries)
    pages = block_table[sequences, positions // page_size].astype(np.int64)
    num_keys = (starts + num_queries).astype(np.int32)
    num_decoding = 0 if decode_by_prefill else sum(item.row.phase is Phase.DECODE for item in placed)

    def phase(rows: slice) -> PhaseInputs:
        return PhaseInputs(block_table[rows], num_keys[rows], num_queries[rows])

    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slots=pages * page_size + positions % page_size,
        decode=phase(slice(0, num_decoding)),
        prefill=phase(slice(num_decoding, None)),
    )


def idle_step(num_rows: int, *, decode_by_prefill: bool = False) -> StepInputs:
    """Rows of one token each that touch nothing: they have no slot and no keys, so they store nothing and attend to
    nothing."""
    rows = PhaseInputs(
        block_table=np.zeros((num_rows, 1), dtype=np.int32),
        num_keys=np.zeros(num_rows, dtype=np.int32),
        num_queries=np.ones(num_rows, dtype=np.int32),
    )
    none = PhaseInputs(rows.block_table[:0], rows.num_keys[:0], rows.num_queries[:0])
    return StepInputs(
        token_ids=np.zeros(num_rows, dtype=np.int64),
        positions=np.zeros(num_rows, dtype=np.int64),
        slots=np.full(num_rows, NO_SLOT, dtype=np.int64),
        decode=none if decode_by_prefill else rows,
        prefill=rows if decode_by_prefill else none,
    )


def pad_step(step: StepInputs, num_rows: int) -> StepInputs:
    """A step whose rows have one token each and are of one phase, with idle rows added up to `num_rows`.

    ValueError for another step, or one that has more rows.
    """
    in_prefill = step.prefill.num_sequences > 0
    num_sequences = (step.prefill if in_prefill else step.decode).num_sequences
    if num_sequences != step.num_tokens or num_sequences > num_rows:
        raise ValueError(
            f"the step has {step.num_tokens} tokens, {step.decode.num_sequences} decode rows and "
            f"{step.prefill.num_sequences} prefill rows; accepted: at most {num_rows} rows of one token and one phase"
        )
    idle = idle_step(num_rows - num_sequences, decode_by_prefill=in_prefill)
    return StepInputs(
        token_ids=np.concatenate((step.token_ids, idle.token_ids)),
        positions=np.concatenate((step.positions, idle.positions)),
        slots=np.concatenate((step.slots, idle.slots)),
        decode=step.decode if in_prefill else _joined(step.decode, idle.decode),
        prefill=_joined(step.prefill, idle.prefill) if in_prefill else step.prefill,
    )


def _joined(phase: PhaseInputs, idle: PhaseInputs) -> PhaseInputs:
    block_table = np.zeros((phase.num_sequences + idle.num_sequences, phase.block_table.shape[1]), dtype=np.int32)
    block_table[: phase.num_sequences] = phase.block_table
    return PhaseInputs(
        block_table=block_table,
        num_keys=np.concatenate((phase.num_keys, idle.num_keys)),
        num_queries=np.concatenate((phase.num_queries, idle.num_queries)),
    )
