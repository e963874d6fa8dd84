"""The table of attention configs: whole, strict, and blind to what may not change a row's bits."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import product

import pytest
import torch

from sapwood_kernels.config_table import (
    ARCHS,
    DTYPES,
    HEAD_DIMS,
    INTERPRETER_ARCH,
    MAX_GROUP,
    PAGE_SIZES,
    AttentionConfig,
    ConfigKey,
    attention_config,
    config_rows,
    device_arch,
    format_rows,
    padded_group,
    parse_rows,
)
from sapwood_kernels.values import AttentionPhase

PREFILL, DECODE = AttentionPhase.PREFILL, AttentionPhase.DECODE
ALL_KEYS = [
    ConfigKey(arch=arch, head_dim=head_dim, group=group, dtype=dtype, phase=phase)
    for arch, head_dim, group, dtype, phase in product(
        ARCHS, HEAD_DIMS, range(1, MAX_GROUP + 1), DTYPES.values(), AttentionPhase
    )
]
KEY = ConfigKey(arch=90, head_dim=128, group=4, dtype=torch.bfloat16, phase=DECODE)


def test_every_key_has_a_config() -> None:
    for key in ALL_KEYS:
        config = attention_config(key)
        assert config.block_m >= padded_group(key.group)
        assert (config.split_size > 0) == (key.phase is DECODE)


def test_a_group_has_the_config_of_its_padded_size() -> None:
    assert [padded_group(group) for group in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32)] == [1, 2, 4, 4, 8, 8, 16, 16, 32, 32]
    for key in ALL_KEYS:
        assert attention_config(key) == attention_config(dataclasses.replace(key, group=padded_group(key.group)))


def test_splits_end_where_tiles_and_pages_do() -> None:
    for key in ALL_KEYS:
        config = attention_config(key)
        assert [size for size in (config.block_n, *PAGE_SIZES) if config.split_size % size] == []


def test_prefill_tiles_follow_the_head_dim_and_the_dtype() -> None:
    """design §5: 128 rows up to head dim 128, 64 above, where 128 spill; 16 or 32 in float32."""
    for key in ALL_KEYS:
        if key.arch == INTERPRETER_ARCH:
            continue
        block_m = attention_config(key).block_m
        if key.dtype is torch.float32:
            assert block_m in (16, 32)
        elif key.phase is PREFILL:
            assert block_m == (128 if key.head_dim <= 128 else 64)


def test_register_bounds_are_what_a_number_of_programs_leaves_each() -> None:
    """65,536 to a multiprocessor, given to a warp by 8 for each thread; 255 is the most that a thread can have."""
    for key in ALL_KEYS:
        config = attention_config(key)
        share = 65536 // (config.num_warps * 32)
        steps = {min(255, share // programs // 8 * 8) for programs in range(1, 17)}
        assert {config.max_registers, config.max_wide_registers} - {0} <= steps


def test_decode_tiles_are_too_small_for_other_matrix_instructions() -> None:
    """From 64 rows on, Hopper multiplies by wgmma, whose sums have another order than mma.sync's."""
    assert {attention_config(key).block_m for key in ALL_KEYS if key.phase is DECODE} == {16, 32}


def test_newer_devices_run_the_rows_of_one_with_as_much_shared_memory() -> None:
    for arch, known in ((87, 80), (100, 90), (103, 90), (110, 90), (120, 89), (121, 89)):
        assert attention_config(dataclasses.replace(KEY, arch=arch)) == attention_config(
            dataclasses.replace(KEY, arch=known)
        )


@pytest.mark.parametrize(
    "change",
    [
        {"arch": 75},
        {"arch": 101},
        {"head_dim": 72},
        {"head_dim": 512},
        {"group": 0},
        {"group": -3},
        {"group": 33},
        {"dtype": torch.float64},
    ],
)
def test_an_unknown_key_names_what_is_accepted(change: dict[str, object]) -> None:
    key = dataclasses.replace(KEY, **change)  # type: ignore[arg-type]
    message = f"capability {key.arch}, head_dim {key.head_dim}, {key.group} query heads .* {key.dtype}; accepted: "
    with pytest.raises(ValueError, match=message + r".*80, 86, .*64, 80, .*1 to 32 heads and torch\.bfloat16, "):
        attention_config(key)


def test_a_table_survives_being_written_and_read() -> None:
    assert parse_rows(format_rows(config_rows())) == config_rows()


def broken(**changes: object) -> str:
    """The first decode row of the table, changed; a field that becomes None is taken out."""
    row = next(row for row in config_rows() if row.phase is DECODE and row.arch == 90)
    (values,) = json.loads(format_rows([row]))
    return json.dumps([{name: value for name, value in (values | changes).items() if value is not None}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (broken(num_warps=None), "accepted: exactly"),
        (broken(block_k=16), "accepted: exactly"),
        (broken(arch=91), "arch is 91; accepted: [0, 80"),
        (broken(arch="90"), "arch is '90'; accepted"),
        (broken(phase="both"), "'both' is not a valid AttentionPhase"),
        (broken(head_dims=[]), "head_dims is []; accepted: some of"),
        (broken(head_dims=128), "head_dims is 128; accepted: some of"),
        (broken(groups=[3]), "groups is 3; accepted: [1, 2, 4"),
        (broken(dtypes=["float8"]), "dtypes is 'float8'; accepted"),
        (broken(block_m=48), "block_m is 48; accepted: a power of two from 16"),
        (broken(block_n=8), "block_n is 8; accepted: a power of two from 16"),
        (broken(num_warps=3), "num_warps is 3; accepted: a power of two from 1"),
        (broken(num_warps=True), "num_warps is True; accepted: a whole number"),
        (broken(num_stages=0), "num_stages is 0; accepted: 1 or more"),
        (broken(max_registers=256), "max_registers is 256; accepted: 1 to 255"),
        (broken(split_size=100), "split_size is 100; accepted: a multiple of block_n"),
        (broken(split_size=0), "split_size is 0; accepted: 0 for prefill, else"),
        (
            broken(block_n=16, split_size=16),
            "split_size is 16; accepted: 0 for prefill, else a multiple of (16, 32, 64)",
        ),
        (broken(row_blocks=0), "row_blocks is 0; accepted: 1 or more"),
        (broken(min_group_rows=0), "min_group_rows is 0; accepted: 1 or more"),
        (broken(row_blocks=1, max_wide_registers=200), "accepted: a bound for a wide form, and none without one"),
        (broken(row_blocks=2, max_wide_registers=0), "accepted: a bound for a wide form, and none without one"),
        (broken(max_wide_registers=-1), "max_wide_registers is -1; accepted: 0 to 255"),
        (broken(groups=[32], block_m=16), "block_m is 16; accepted: at least a group, 32"),
        (broken(source="somewhere"), "source is 'somewhere'; accepted"),
    ],
)
def test_a_row_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_rows(text)
    assert str(error.value).startswith("row 0 of the attention configs, {")


def test_two_rows_for_one_key_are_refused() -> None:
    (row,) = json.loads(broken(groups=[4, 8], block_m=16))
    with pytest.raises(ValueError, match="rows 0 and 1 of the attention configs both answer"):
        parse_rows(json.dumps([row, row | {"groups": [8, 16]}]))


def test_a_config_of_a_caller_is_checked_as_a_row_is() -> None:
    with pytest.raises(ValueError, match="split_size is 48; accepted: a multiple of block_n, 32, or 0"):
        AttentionConfig(block_m=16, block_n=32, num_warps=4, num_stages=1, max_registers=255, split_size=48)


def test_the_cpu_is_the_interpreters_and_other_devices_are_refused() -> None:
    assert device_arch(torch.device("cpu")) == INTERPRETER_ARCH
    with pytest.raises(ValueError, match="device is meta; accepted: cuda, or cpu"):
        device_arch(torch.device("meta"))
