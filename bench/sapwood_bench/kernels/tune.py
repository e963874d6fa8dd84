"""`python -m sapwood_bench.kernels.tune`: better tiles for this machine's GPU, written to the config table.

Run by hand, never by a server: a config decides bits, so it must not depend on what a machine was doing at the time.
With `--compile-only` no tile changes; every row's register bounds are set to what the compile gate sees, which needs no
GPU.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.resources
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sapwood_bench.kernels.attention import PlanOptions, plan_attention
from sapwood_bench.kernels.cases import AttentionCase, Chunk, Heads, SharedRows
from sapwood_bench.kernels.device import Device, NoDeviceError, describe, measured_device
from sapwood_bench.kernels.errors import MEASURE_ERRORS
from sapwood_bench.kernels.inputs import make_inputs
from sapwood_bench.kernels.results import Failure
from sapwood_bench.kernels.timing import Contender, first_line, time_contenders
from sapwood_bench.kernels.variants import compiled
from sapwood_kernels.config_table import AttentionConfig, ConfigRow, config_rows, device_arch, format_rows
from sapwood_kernels.gate_cases import compile_attention
from sapwood_kernels.values import AttentionPhase

_GAIN = 0.98
"""A config replaces the table's only if it takes at most this share of its time: less is noise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table after each row. Exit codes: 0, or 2 where there is nothing to tune for."""
    parser = argparse.ArgumentParser(prog="python -m sapwood_bench.kernels.tune", description=__doc__)
    parser.add_argument("--compile-only", action="store_true", help="Update register bounds alone.")
    parser.add_argument("--table", type=Path, default=table_path(), help="File to write; default: the package's own.")
    options = parser.parse_args(arguments)
    change: Callable[[ConfigRow], ConfigRow] = with_bounds
    if not options.compile_only:
        try:
            device = _tuned_device()
        except NoDeviceError as error:
            print(f"sapwood bench kernels --tune: {error}; nothing was tuned", file=sys.stderr)
            return 2
        change = functools.partial(tuned, device=device)
    rows = list(config_rows())
    for number, row in enumerate(rows):
        rows[number] = change(row)
        _write(options.table, format_rows(rows))
    print(f"wrote {options.table}", file=sys.stderr)
    return 0


def _tuned_device() -> Device:
    """The first GPU. NoDeviceError also for one that runs another's rows, which must not be tuned on it."""
    device = measured_device(dry=False)
    arch = device_arch(device.torch_device)
    if all(row.arch != arch for row in config_rows()):
        raise NoDeviceError(f"the config table has no rows of compute capability {arch // 10}.{arch % 10} itself")
    return device


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a run of hours may be ended at any time."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def table_path() -> Path:
    """The package's table, a file of a source tree."""
    return Path(str(importlib.resources.files("sapwood_kernels").joinpath("attention_configs.json")))


def with_bounds(row: ConfigRow) -> ConfigRow:
    """The row with the register bounds that the compile gate sees; the interpreter's rows as they are."""
    if row.arch == 0:
        return row
    found = compiled(row, row.config, compile_attention)
    _say(row, "; ".join(found.problems) or f"registers {found.config.max_registers}")
    return replace(row, config=found.config)


def tuned(row: ConfigRow, device: Device) -> ConfigRow:
    """The row with the fastest config that compiles well in all its variants; unchanged if it isn't this device's, or
    fp32, which no target is set for."""
    if row.arch != device_arch(device.torch_device) or torch.float32 in row.dtypes:
        return row
    usable = {}
    for config in (row.config, *candidates(row)):
        try:
            found = compiled(row, config, compile_attention)
            if not found.problems:
                usable[found.config] = _times(row, found.config, device)
        except MEASURE_ERRORS as error:
            _say(row, f"dropped {config}: {first_line(error)}")
    if not usable:
        _say(row, "no candidate compiles without spilling; left as it is")
        return row
    own = next((times for config, times in usable.items() if _same_tiles(config, row.config)), None)
    best = min(usable, key=lambda config: _relative(usable[config], usable))
    if own is not None and sum(usable[best]) > _GAIN * sum(own):
        best = next(config for config in usable if _same_tiles(config, row.config))
    machine = describe(device)
    source = f"measured: {machine['gpu']}, triton {machine['triton']}, {datetime.date.today()}, --tune"
    _say(row, f"{best}")
    return replace(row, config=best, source=source)


def candidates(row: ConfigRow) -> list[AttentionConfig]:
    """What is tried beside the table's own. BLOCK_M stays: in decode another one may have other bits (mma.sync or
    wgmma), in prefill it is set by the head dim."""
    found = []
    is_decode = row.phase is AttentionPhase.DECODE
    splits = (256, 512) if is_decode else (0,)
    blocks = tuple(sorted({1, 2, 4} if row.config.row_blocks > 1 else {1}))
    for block_n, num_warps, num_stages, split_size, row_blocks in itertools.product(
        (32, 64, 128), (4, 8), (2, 3, 4, 5), splits, blocks
    ):
        config = replace(
            row.config,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            split_size=split_size,
            row_blocks=row_blocks,
            max_wide_registers=row.config.max_wide_registers if row_blocks > 1 else 0,
        )
        if not _same_tiles(config, row.config):
            found.append(config)
    return found


def tuning_cases(row: ConfigRow) -> tuple[AttentionCase, ...]:
    """What a candidate is timed on: the row's largest head dim, a group that it holds for."""
    head_dim = row.head_dims[-1]
    group = min(4, row.groups[-1]) if 4 in row.groups else row.groups[-1]
    heads = Heads("tuning", 8 * group, 8, head_dim)
    base = AttentionCase(name="tuning", heads=heads, dtype=str(row.dtypes[0]).removeprefix("torch."))
    if row.phase is AttentionPhase.PREFILL:
        chunks = ((Chunk(8192, 8192),), (Chunk(1024, 1024),) * 8, (Chunk(512, 16_384),))
        return tuple(replace(base, prefill=chunk) for chunk in chunks)
    return (
        replace(base, decode=(4096,) * 32),
        replace(base, decode=(32_768,)),
        replace(base, decode=(4352,) * 64, shared=(SharedRows(0, 64, 4096),)),
    )


def _times(row: ConfigRow, config: AttentionConfig, device: Device) -> tuple[float, ...]:
    """Microseconds on each tuning case; infinite where it can't run."""
    options = PlanOptions(decode=config, prefill=config)
    times = []
    for case in tuning_cases(row):
        plans = [plan_attention(make_inputs(case, device.torch_device, seed=seed), options) for seed in range(2)]
        time = time_contenders([Contender("it", [plan.run for plan in plans])], device.prepare, rounds=3)["it"]
        times.append(float("inf") if isinstance(time, Failure) else time)
    return tuple(times)


def _relative(times: tuple[float, ...], all_times: dict[AttentionConfig, tuple[float, ...]]) -> float:
    """The sum over cases of the time relative to the best of that case, so that short cases count as long ones do."""
    best = [min(column) for column in zip(*all_times.values(), strict=True)]
    return math.fsum(time / least for time, least in zip(times, best, strict=True))


def _same_tiles(one: AttentionConfig, other: AttentionConfig) -> bool:
    bounds = {"max_registers": 1, "max_wide_registers": 0}
    return replace(one, **bounds) == replace(other, **bounds)


def _say(row: ConfigRow, what: str) -> None:
    print(f"sm_{row.arch} {row.phase.value} {list(row.head_dims)} {list(row.groups)}: {what}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
