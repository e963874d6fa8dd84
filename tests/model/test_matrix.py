"""Merging packed parts: only where each has a packed form, in order."""

from __future__ import annotations

import torch

from sapwood_server.model.matrix import PackedQ4, merge_packed


def q4(value: int, rows: int) -> PackedQ4:
    column = torch.full((rows, 2), float(value))
    return PackedQ4(torch.full((rows, 64), value, dtype=torch.uint8), column, -column)


def test_parts_come_one_below_the_other() -> None:
    packed = merge_packed([q4(3, 2), q4(5, 1)])
    assert packed is not None
    assert packed.quants[:, 0].tolist() == [3, 3, 5]
    assert packed.scale[:, 1].tolist() == [3.0, 3.0, 5.0]
    assert packed.minimum[:, 0].tolist() == [-3.0, -3.0, -5.0]


def test_a_part_alone_is_not_copied() -> None:
    part = q4(3, 2)
    assert merge_packed([part]) is part


def test_a_part_without_a_packed_form_leaves_none() -> None:
    mixtures: list[list[PackedQ4 | None]] = [[q4(1, 1), None], [None, q4(1, 1)], [None]]
    for parts in mixtures:
        assert merge_packed(parts) is None
