"""Where the rows of a step find their sequences' keys and values, and the order in which they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from sapwood_server.model.dense_kv import DenseCopy, DenseKV
from sapwood_server.model.kv import BlockTables, PageBounds, PagedKV
from sapwood_server.values.plan import Phase, RowPlan, StepPlan


@dataclass(frozen=True)
class PlacedRow:
    """A row of the plan, and where its sequence's keys and values are."""

    index: int
    """In the plan."""
    row: RowPlan
    pages: npt.NDArray[np.int32]
    """The sequence's block table; may have pages beyond this row."""
    dense: DenseCopy | None = None
    """Only for a decode row on the CPU: holds the tokens before this row's."""

    @property
    def num_keys(self) -> int:
        """Tokens of the sequence, with this row's."""
        return self.row.start + len(self.row.token_ids)

    def slots(self, page_size: int) -> npt.NDArray[np.int64]:
        """The slot of each of the row's tokens."""
        positions = np.arange(self.row.start, self.num_keys)
        return self.pages[positions // page_size].astype(np.int64) * page_size + positions % page_size


def place_rows(plan: StepPlan, tables: BlockTables, bounds: PageBounds) -> list[PlacedRow]:
    """The plan's rows in the order of computing: decode rows, then prefill rows. Extends the block tables.

    ValueError for a page that does not exist, a table too short, and a decode row of more than one token.
    """
    for row in plan.rows:
        for page in row.new_pages:
            bounds.check_page(page)
        if row.phase is Phase.DECODE and len(row.token_ids) != 1:
            raise ValueError(f"a decode row has {len(row.token_ids)} tokens; accepted: 1")
    placed = [
        PlacedRow(index, row, tables.extend(row.sequence_id, row.new_pages, row.start + len(row.token_ids)))
        for index, row in enumerate(plan.rows)
    ]
    return sorted(placed, key=lambda item: item.row.phase is Phase.PREFILL)


def place_dense(placed: Sequence[PlacedRow], kv: PagedKV, dense_kv: DenseKV) -> list[PlacedRow]:
    """The same rows with dense copies for decode rows, as far as their budget goes; those that have one come first."""
    with_copies = [
        replace(item, dense=_dense_copy(item, kv, dense_kv)) if item.row.phase is Phase.DECODE else item
        for item in placed
    ]
    return sorted(with_copies, key=lambda item: item.dense is None)


def _dense_copy(item: PlacedRow, kv: PagedKV, dense_kv: DenseKV) -> DenseCopy | None:
    row = item.row
    copy = dense_kv.get(row.sequence_id, row.start)
    if copy is None:
        copy = dense_kv.create(row.sequence_id, row.start)
        if copy is not None:
            used = torch.tensor(item.pages[: -(-row.start // kv.page_size)], dtype=torch.int64)
            copy.fill((kv.gather(layer, used) for layer in range(kv.num_layers)), row.start)
    return copy
