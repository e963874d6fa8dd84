"""Tile sizes of the attention kernels, looked up by what a kernel is compiled for. Nothing is tuned at run time.

The table is `attention_configs.json` beside this file. A row holds for every combination of the head dims, groups and
dtypes it names, and says where its tiles were measured or that they are a guess. That a row compiles, without spills
within its registers, is what the compile gate checks (`sapwood_kernels.gate`), which needs no device.

A batch's size and its lengths are no part of a key: a config decides the order of sums, so the bits of a row's answer.
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

import torch

from sapwood_kernels.values import AttentionPhase

INTERPRETER_ARCH = 0
"""In place of a compute capability, where Triton's interpreter runs kernels on the CPU."""

MAX_GROUP = 32
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
PAGE_SIZES = (16, 32, 64)
ARCHS = (INTERPRETER_ARCH, 80, 86, 89, 90)
"""Those with rows of their own."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Others run the rows of the nearest one that has as much shared memory for a block: 99 KiB on 8.6, 8.9 and 12.x, 163 on
# 8.0 and 8.7, 227 on 9.0, 10.x and 11.0. Nothing was measured on them.
_STAND_INS = {87: 80, 100: 90, 103: 90, 110: 90, 120: 89, 121: 89}


@dataclass(frozen=True, kw_only=True)
class ConfigKey:
    """What decides a config. Never a batch's size or a length: bits may depend on a config."""

    arch: int
    """Compute capability, 90 for 9.0."""
    head_dim: int
    group: int
    """Query heads to a key-value head."""
    dtype: torch.dtype
    """Of queries."""
    phase: AttentionPhase


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A compiled kernel's constants. Raises ValueError for sizes that no kernel can have."""

    block_m: int
    """Rows of a program: queries times heads of a group, padded to a power of two."""
    block_n: int
    """Keys of a tile. Tiles start at multiples of it, counted from position 0."""
    num_warps: int
    num_stages: int
    max_registers: int
    """Per thread, an order to the compiler, which spills what doesn't fit; the compile gate fails if anything does. The
    most that leave a multiprocessor room for some number of programs: with 4 warps 128 for four, 168 for three, 255 for
    two; with 8 warps 128 for two, 255 for one."""
    split_size: int = 0
    """Decode: keys of a split, a multiple of `block_n` and of every page size. 0 for prefill."""
    row_blocks: int = 1
    """Decode: row blocks of `block_m` rows that a wide item carries over one loaded tile. 1: there is no wide form."""
    max_wide_registers: int = 0
    """The same of the wide form; 0 where there is none."""
    min_group_rows: int = 2
    """Decode: how many rows that share a split's pages share an item. 2 is a guess still to be measured, see
    `decode_work`."""

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "num_warps"):
            value, least = getattr(self, name), 1 if name == "num_warps" else 16
            if value < least or value & (value - 1):
                raise ValueError(f"{name} is {value}; accepted: a power of two from {least}")
        for name in ("num_stages", "row_blocks", "min_group_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        for name, least in (("max_registers", 1), ("max_wide_registers", 0)):
            if not least <= getattr(self, name) <= 255:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: {least} to 255")
        if self.split_size < 0 or self.split_size % self.block_n:
            raise ValueError(f"split_size is {self.split_size}; accepted: a multiple of block_n, {self.block_n}, or 0")


@dataclass(frozen=True, kw_only=True)
class ConfigRow:
    """A config and the keys it holds for: every combination of what its lists name."""

    arch: int
    phase: AttentionPhase
    head_dims: tuple[int, ...]
    groups: tuple[int, ...]
    """Padded to a power of two: 4 stands for 3 and 4."""
    dtypes: tuple[torch.dtype, ...]
    config: AttentionConfig
    source: str
    """Where the tiles were measured ("measured: ...") or that they are still to be ("guess: ...")."""

    def answers(self) -> list[ConfigKey]:
        """The keys it holds for, each group as its padded size."""
        return [
            ConfigKey(arch=self.arch, head_dim=head_dim, group=group, dtype=dtype, phase=self.phase)
            for head_dim, group, dtype in itertools.product(self.head_dims, self.groups, self.dtypes)
        ]


def attention_config(key: ConfigKey) -> AttentionConfig:
    """The config of `key`. Raises ValueError, naming what is accepted, if the table has none."""
    padded = key.group if key.group < 1 else padded_group(key.group)
    arch = _STAND_INS.get(key.arch, key.arch)
    found = _index().get(ConfigKey(arch=arch, head_dim=key.head_dim, group=padded, dtype=key.dtype, phase=key.phase))
    if found is None:
        raise ValueError(
            f"no attention config for compute capability {key.arch}, head_dim {key.head_dim}, {key.group} query heads "
            f"to a key-value head and {key.dtype}; accepted: compute capability {sorted({*ARCHS[1:], *_STAND_INS})}, "
            f"head_dim {list(HEAD_DIMS)}, 1 to {MAX_GROUP} heads and {', '.join(map(str, DTYPES.values()))}"
        )
    return found


def padded_group(group: int) -> int:
    """The rows that a kernel gives one query: `group` heads and padding, up to a power of two."""
    return 1 << (group - 1).bit_length()


def device_arch(device: torch.device) -> int:
    """A CUDA device's compute capability, 90 for 9.0; INTERPRETER_ARCH for the CPU. Raises ValueError for others."""
    if device.type == "cpu":
        return INTERPRETER_ARCH
    if device.type != "cuda":
        raise ValueError(f"device is {device}; accepted: cuda, or cpu for Triton's interpreter")
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@functools.cache
def config_rows() -> tuple[ConfigRow, ...]:
    """The table, in the order of its file."""
    return parse_rows(
        importlib.resources.files("sapwood_kernels").joinpath("attention_configs.json").read_text("utf-8")
    )


def parse_rows(text: str) -> tuple[ConfigRow, ...]:
    """The rows of a table as `format_rows` writes it.

    Raises ValueError with the row's number for one that is incomplete, has a field we don't know or a value that can't
    be, and for a key that two rows answer.
    """
    rows: list[ConfigRow] = []
    answered: dict[ConfigKey, int] = {}
    for number, values in enumerate(json.loads(text)):
        try:
            row = _parse_row(values)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"row {number} of the attention configs, {json.dumps(values)}: {error}") from error
        for key in row.answers():
            if key in answered:
                raise ValueError(f"rows {answered[key]} and {number} of the attention configs both answer {key}")
            answered[key] = number
        rows.append(row)
    return tuple(rows)


def format_rows(rows: Iterable[ConfigRow]) -> str:
    """The table as JSON, a row a line."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    lines = [
        json.dumps(
            {
                "arch": row.arch,
                "phase": row.phase.value,
                "head_dims": row.head_dims,
                "groups": row.groups,
                "dtypes": [names[dtype] for dtype in row.dtypes],
                **asdict(row.config),
                "source": row.source,
            }
        )
        for row in rows
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


T = TypeVar("T")

_CONFIG_FIELDS = tuple(field.name for field in fields(AttentionConfig))
_ROW_FIELDS = ("arch", "phase", "head_dims", "groups", "dtypes", *_CONFIG_FIELDS, "source")


def _parse_row(values: dict[str, object]) -> ConfigRow:
    if set(values) != set(_ROW_FIELDS):
        raise ValueError(f"has the fields {sorted(values)}; accepted: exactly {sorted(_ROW_FIELDS)}")
    row = ConfigRow(
        arch=_one_of("arch", values["arch"], ARCHS),
        phase=AttentionPhase(values["phase"]),
        head_dims=_some_of("head_dims", values["head_dims"], HEAD_DIMS),
        groups=_some_of("groups", values["groups"], [1 << power for power in range(MAX_GROUP.bit_length())]),
        dtypes=tuple(DTYPES[name] for name in _some_of("dtypes", values["dtypes"], DTYPES)),
        config=AttentionConfig(**{name: _whole(name, values[name]) for name in _CONFIG_FIELDS}),
        source=str(values["source"]),
    )
    split_size = row.config.split_size
    if (split_size == 0) != (row.phase is AttentionPhase.PREFILL) or any(split_size % size for size in PAGE_SIZES):
        raise ValueError(f"split_size is {split_size}; accepted: 0 for prefill, else a multiple of {PAGE_SIZES}")
    if (row.config.row_blocks > 1) != (row.config.max_wide_registers > 0):
        raise ValueError(
            f"row_blocks is {row.config.row_blocks} and max_wide_registers {row.config.max_wide_registers}; "
            "accepted: a bound for a wide form, and none without one"
        )
    if max(row.groups) > row.config.block_m:
        raise ValueError(f"block_m is {row.config.block_m}; accepted: at least a group, {max(row.groups)}")
    if not row.source.startswith(("measured: ", "guess: ")):
        raise ValueError(f"source is {row.source!r}; accepted: one that starts with 'measured: ' or 'guess: '")
    return row


def _whole(name: str, value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}; accepted: a whole number")
    return value


def _one_of(name: str, value: object, accepted: Iterable[T]) -> T:
    for known in accepted:
        if type(value) is type(known) and value == known:
            return known
    raise ValueError(f"{name} is {value!r}; accepted: {list(accepted)}")


def _some_of(name: str, values: object, accepted: Iterable[T]) -> tuple[T, ...]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} is {values!r}; accepted: some of {list(accepted)}")
    return tuple(_one_of(name, value, accepted) for value in values)


@functools.cache
def _index() -> dict[ConfigKey, AttentionConfig]:
    return {key: row.config for row in config_rows() for key in row.answers()}
