"""Merging packed parts: only ever parts of one kind, in order."""

from __future__ import annotations

import torch

from sapwood_server.model.matrix import PackedQ4, PackedQ8, merge_packed


def q4(value: int, rows: int) -> PackedQ4:
    column = torch.full((rows, 2), float(value))
    return PackedQ4(torch.full((rows, 64), value, dtype=torch.uint8), column, -column)


def q8(value: int, rows: int) -> PackedQ8:
    return PackedQ8(torch.full((rows, 64), value, dtype=torch.int8), torch.full((rows, 2), float(value)))


def test_parts_of_one_kind_come_one_below_the_other() -> None:
    packed, int8 = merge_packed([q4(3, 2), q4(5, 1)])
    assert int8 is None
    assert packed is not None
    assert packed.quants[:, 0].tolist() == [3, 3, 5]
    assert packed.scale[:, 1].tolist() == [3.0, 3.0, 5.0]
    assert packed.minimum[:, 0].tolist() == [-3.0, -3.0, -5.0]
    packed, int8 = merge_packed([q8(-3, 1), q8(5, 2)])
    assert packed is None
    assert int8 is not None
    assert int8.quants[:, 63].tolist() == [-3, 5, 5]
    assert int8.scale[:, 0].tolist() == [-3.0, 5.0, 5.0]


def test_a_mixture_has_no_packed_form() -> None:
    mixtures: list[list[PackedQ4 | PackedQ8 | None]] = [
        [q4(1, 1), q8(1, 1)],
        [q4(1, 1), None],
        [None, q8(1, 1)],
        [None],
    ]
    for parts in mixtures:
        assert merge_packed(parts) == (None, None)
