"""One step's inputs as arrays on the host: built once, used by every layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sapwood_server.model.kv import BlockTables
from sapwood_server.model.placement import PlacedRow
from sapwood_server.values.plan import Phase

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

Number = TypeVar("Number", np.int32, np.int64)

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


def pad_step(step: StepInputs, num_rows: int) -> StepInputs:
    """A step whose rows have one token each and are of one phase, with rows added up to `num_rows`.

    Those touch nothing: they have no slot and no keys, so they store nothing and attend to nothing. ValueError for
    another step, or one that has more rows.
    """
    missing = num_rows - step.num_tokens
    phases = [phase for phase in (step.decode, step.prefill) if phase.num_sequences]
    if missing < 0 or len(phases) != 1 or phases[0].num_sequences != step.num_tokens:
        raise ValueError(
            f"the step has {step.num_tokens} tokens, {step.decode.num_sequences} decode rows and "
            f"{step.prefill.num_sequences} prefill rows; accepted: at most {num_rows} rows of one token and one phase"
        )

    def padded(phase: PhaseInputs) -> PhaseInputs:
        if not phase.num_sequences:
            return phase
        block_table = np.pad(phase.block_table, ((0, missing), (0, 0)))
        return PhaseInputs(block_table, np.pad(phase.num_keys, (0, missing)), _padded(phase.num_queries, missing, 1))

    return StepInputs(
        token_ids=_padded(step.token_ids, missing, 0),
        positions=_padded(step.positions, missing, 0),
        slots=_padded(step.slots, missing, NO_SLOT),
        decode=padded(step.decode),
        prefill=padded(step.prefill),
    )


def _padded(values: npt.NDArray[Number], missing: int, fill: int) -> npt.NDArray[Number]:
    return np.concatenate((values, np.full(missing, fill, dtype=values.dtype)))
