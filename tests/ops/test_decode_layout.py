"""What all steps of decode have in common: its arithmetic, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sapwood_kernels.config_table import AttentionConfig
from sapwood_kernels.decode_layout import DecodeGrid, DecodeLayout, resident_grid

CONFIG = AttentionConfig(
    block_m=16,
    block_n=64,
    num_warps=4,
    num_stages=5,
    max_registers=165,
    split_size=256,
    row_blocks=2,
    max_wide_registers=230,
)
LAYOUT = DecodeLayout(config=CONFIG, arch=90, group=4, page_size=16, num_pages=100, capacity=10)


@pytest.mark.parametrize(("group", "rows"), [(1, 16), (2, 8), (3, 4), (4, 4), (5, 2), (8, 2), (9, 1), (16, 1)])
def test_a_group_takes_a_power_of_two_of_a_row_block(group: int, rows: int) -> None:
    assert replace(LAYOUT, group=group).rows_per_block == rows


def test_a_split_is_whole_pages() -> None:
    assert [replace(LAYOUT, page_size=size).pages_per_split for size in (16, 32, 64)] == [16, 8, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 24}, "page_size is 24; accepted: a divisor of split_size, 256"),
        ({"page_size": 0}, "page_size is 0"),
        ({"config": replace(CONFIG, split_size=0)}, "accepted: a divisor of split_size, 0"),
        ({"group": 17}, "group is 17; accepted: 1 to block_m, 16"),
        ({"group": 0}, "group is 0"),
        ({"capacity": 0}, "capacity is 0; accepted: 1 or more"),
        ({"num_pages": 0}, "num_pages is 0; accepted: 1 or more"),
        ({"window": 0}, "window is 0; accepted: 1 or more, or None"),
    ],
)
def test_what_no_kernel_was_made_for_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAYOUT, **changes)  # type: ignore[arg-type]


def test_programs_are_as_many_as_registers_hold() -> None:
    """165 registers are given as 168: 65,536 of them hold three programs of 128 threads, and 232 hold two."""
    assert resident_grid(CONFIG, 132) == DecodeGrid(num_programs=3 * 132, wide_programs=2 * 132)
    assert resident_grid(replace(CONFIG, num_warps=32, max_registers=255), 10).num_programs == 10
    with pytest.raises(ValueError, match="num_sms is 0"):
        resident_grid(CONFIG, 0)
