"""Where the rows of a step find their sequences' keys and values, and the order in which they are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sapwood_server.model.dense_kv import DenseCopy, DenseKV
from sapwood_server.model.kv import BlockTables, PagedKV
from sapwood_server.values.plan import Phase, RowPlan, StepPlan


@dataclass(frozen=True)
class PlacedRow:
    """A row of the plan, and where its sequence's keys and values are."""

    index: int
    """In the plan."""
    row: RowPlan
    pages: list[int]
    """The sequence's block table; may have pages beyond this row."""
    dense: DenseCopy | None
    """Only for a decode row: holds the tokens before this row's."""

    @property
    def num_keys(self) -> int:
        """Tokens of the sequence, with this row's."""
        return self.row.start + len(self.row.token_ids)

    def slots(self, page_size: int) -> list[int]:
        """The slot of each of the row's tokens."""
        positions = range(self.row.start, self.num_keys)
        return [self.pages[position // page_size] * page_size + position % page_size for position in positions]


def place_rows(plan: StepPlan, tables: BlockTables, kv: PagedKV, dense_kv: DenseKV) -> list[PlacedRow]:
    """The plan's rows in the order of computing: decode rows with dense copies, other decode rows, prefill rows.

    Extends the block tables, and makes dense copies as far as their budget goes.
    """
    placed = []
    for index, row in enumerate(plan.rows):
        for page in row.new_pages:
            kv.check_page(page)
        pages = tables.extend(row.sequence_id, row.new_pages, row.start + len(row.token_ids))
        dense = _dense_copy(row, pages, kv, dense_kv) if row.phase is Phase.DECODE else None
        placed.append(PlacedRow(index, row, pages, dense))
    return sorted(placed, key=_order)


def _order(placed: PlacedRow) -> int:
    if placed.row.phase is Phase.PREFILL:
        return 2
    return 1 if placed.dense is None else 0


def _dense_copy(row: RowPlan, pages: list[int], kv: PagedKV, dense_kv: DenseKV) -> DenseCopy | None:
    if len(row.token_ids) != 1:
        raise ValueError(f"a decode row has {len(row.token_ids)} tokens; accepted: 1")
    copy = dense_kv.get(row.sequence_id, row.start)
    if copy is None:
        copy = dense_kv.create(row.sequence_id, row.start)
        if copy is not None:
            used = torch.tensor(pages[: -(-row.start // kv.page_size)], dtype=torch.int64)
            copy.fill((kv.gather(layer, used) for layer in range(kv.num_layers)), row.start)
    return copy
