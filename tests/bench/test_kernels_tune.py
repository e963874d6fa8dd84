"""The search for tiles: what is tried, what a compile decides. Timing is a GPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources, PTXASError

from sapwood_bench.kernels import tune
from sapwood_bench.kernels.cases import AttentionCase
from sapwood_bench.kernels.device import Device, measured_device
from sapwood_bench.kernels.tune import candidates, tuning_cases
from sapwood_bench.kernels.variants import Compiled, compiled, variants_of
from sapwood_kernels.config_table import AttentionConfig, ConfigRow, config_rows, format_rows, parse_rows
from sapwood_kernels.gate import CompiledKernel
from sapwood_kernels.gate_cases import AttentionCase as GateCase
from sapwood_kernels.values import AttentionPhase
from support.gate_process import in_gate_process
from support.scale import suite_scale


def find_row(arch: int, phase: AttentionPhase, head_dim: int, group: int = 4) -> ConfigRow:
    return next(
        row
        for row in config_rows()
        if (row.arch, row.phase) == (arch, phase)
        and head_dim in row.head_dims
        and group in row.groups
        and torch.bfloat16 in row.dtypes
    )


DECODE = find_row(90, AttentionPhase.DECODE, 128)
PREFILL = find_row(90, AttentionPhase.PREFILL, 128)


def kernel(case: GateCase, registers: int, **changes: object) -> CompiledKernel:
    made = CompiledKernel(
        name="kernel",
        arch=case.key.arch,
        registers=registers,
        stack_bytes=0,
        shared_bytes=1000,
        wgmma=0,
        mma_sync=1,
        async_copies=1,
        global_loads={16: 1},
        loops=(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_variants_are_every_head_dim_dtype_rule_and_8_bits() -> None:
    variants = variants_of(DECODE, DECODE.config)
    assert {(case.key.head_dim, case.key.dtype) for case in variants} == {
        (head_dim, dtype) for head_dim in DECODE.head_dims for dtype in DECODE.dtypes
    }
    assert {(case.kv_dtype is not None, case.sinks) for case in variants} == {
        (False, False),
        (False, True),
        (True, False),
    }
    old = find_row(80, AttentionPhase.DECODE, 128)
    assert all(case.kv_dtype is None for case in variants_of(old, old.config))


def test_bounds_are_the_most_of_all_variants() -> None:
    def compile_(case: GateCase) -> list[CompiledKernel]:
        assert case.config.max_registers == 255  # else the old bound would decide the new one
        more = 7 if case.sinks else 0
        return [kernel(case, 100 + more), kernel(case, 200 + more)][: 1 + (case.config.row_blocks > 1)]

    wide = replace(DECODE.config, row_blocks=2, max_wide_registers=9)
    found = compiled(DECODE, wide, compile_)
    assert (found.config.max_registers, found.config.max_wide_registers) == (107, 207)
    assert found.problems == []
    narrow = replace(DECODE.config, row_blocks=1, max_wide_registers=0)
    assert compiled(DECODE, narrow, compile_).config.max_wide_registers == 0


@pytest.mark.parametrize("change", [{"stack_bytes": 8}, {"shared_bytes": 2**20}])
def test_what_spills_or_has_too_much_shared_memory_is_unusable(change: dict[str, object]) -> None:
    found = compiled(PREFILL, PREFILL.config, lambda case: [kernel(case, 100, **change)])
    assert len(found.problems) == 1


def test_candidates_keep_what_decides_the_kind_of_product() -> None:
    for row in (DECODE, PREFILL):
        tried = candidates(row)
        assert {config.block_m for config in tried} == {row.config.block_m}
        assert len({(c.block_n, c.num_warps, c.num_stages, c.split_size, c.row_blocks) for c in tried}) == len(tried)
        table = parse_rows(format_rows([replace(row, config=config) for config in tried[:1]]))
        assert table[0].config == tried[0]
    assert {config.split_size for config in candidates(PREFILL)} == {0}
    assert {config.split_size for config in candidates(DECODE)} == {256, 512}


def test_a_candidate_that_cannot_run_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its compilation or its launch fails."""
    first, second, third = candidates(PREFILL)[:3]

    def compiled_(row: ConfigRow, config: AttentionConfig, compile_: object) -> Compiled:
        if config == first:
            raise PTXASError("ptxas failed")
        return Compiled(config, [])

    def times(row: ConfigRow, config: AttentionConfig, device: Device) -> tuple[float, ...]:
        if config == second:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return (1.0 if config == third else 2.0,)

    monkeypatch.setattr(tune, "compiled", compiled_)
    monkeypatch.setattr(tune, "_times", times)
    monkeypatch.setattr(tune, "candidates", lambda row: [first, second, third])
    monkeypatch.setattr(tune, "device_arch", lambda device: 90)
    monkeypatch.setattr(tune, "describe", lambda device: {"gpu": "some GPU", "triton": "3.8"})
    found = tune.tuned(PREFILL, measured_device(dry=True))
    assert found.config == third
    assert found.source.startswith("measured: some GPU")


def test_tuning_cases_are_of_the_row() -> None:
    for row in (DECODE, PREFILL):
        for case in tuning_cases(row):
            assert isinstance(case, AttentionCase)
            assert case.heads.head_dim in row.head_dims
            assert case.heads.group in row.groups
            assert bool(case.decode) == (row.phase is AttentionPhase.DECODE)


def test_the_table_is_a_file_of_the_source_tree() -> None:
    assert parse_rows(tune.table_path().read_text(encoding="utf-8")) == config_rows()


def test_without_a_gpu_nothing_is_tuned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert tune.main(["--table", str(tmp_path / "table.json")]) == 2
    assert "nothing was tuned" in capsys.readouterr().err
    assert not (tmp_path / "table.json").exists()


def test_a_gpu_that_runs_anothers_rows_tunes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "measured_device", lambda dry: measured_device(dry=True))
    monkeypatch.setattr(tune, "device_arch", lambda device: 100)
    assert tune.main(["--table", str(tmp_path / "table.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no rows of compute capability 10.0 itself; nothing was tuned" in line
    assert not (tmp_path / "table.json").exists()


def test_the_table_is_written_after_each_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here the search is ended in its third row."""
    seen: list[ConfigRow] = []

    def tuned(row: ConfigRow, device: Device) -> ConfigRow:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(row)
        return replace(row, source="measured: here")

    monkeypatch.setattr(tune, "measured_device", lambda dry: measured_device(dry=True))
    monkeypatch.setattr(tune, "tuned", tuned)
    with pytest.raises(KeyboardInterrupt):
        tune.main(["--table", str(tmp_path / "table.json")])
    rows = parse_rows((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert rows == (*(replace(row, source="measured: here") for row in seen), *config_rows()[2:])
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def bounded_row(number: int) -> ConfigRow:
    return tune.with_bounds(config_rows()[number])


@pytest.mark.slow
@pytest.mark.skipif(suite_scale() < 1, reason="compiles some ten kernels: at full scale only")
def test_bounds_of_a_real_row(tmp_path: Path) -> None:
    """A row that a device runs is bounded by what ptxas gives it; the interpreter's are left alone."""
    first = next(number for number, row in enumerate(config_rows()) if row == find_row(80, AttentionPhase.PREFILL, 64))
    zero = next(number for number, row in enumerate(config_rows()) if row.arch == 0)
    bounded, untouched = in_gate_process(bounded_row, [first, zero], tmp_path)
    assert untouched == config_rows()[zero]
    assert 32 <= bounded.config.max_registers <= 255
    assert replace(bounded.config, max_registers=1) == replace(config_rows()[first].config, max_registers=1)
