"""What `paged_decode` becomes on sm_80 and sm_90, row by row of the config table, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sapwood_kernels.decode_layout import resident_grid
from sapwood_kernels.gate import CompiledKernel, resident_programs, violations
from sapwood_kernels.gate_cases import AttentionCase
from sapwood_kernels.values import AttentionPhase
from support.gate_table import bound_of, case_name, compiled_cases, judged_cases, narrow_loads

CASES = judged_cases(AttentionPhase.DECODE)
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=map(case_name, CASES))


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> dict[str, list[CompiledKernel] | str]:
    return compiled_cases(AttentionPhase.DECODE, triton_cache)


@EVERY_CASE
def test_a_row_of_the_table_compiles_to_what_it_should(
    kernels: dict[str, list[CompiledKernel] | str], case: AttentionCase
) -> None:
    found = kernels[case_name(case)]
    assert not isinstance(found, str), found
    assert len(found) == (2 if case.config.row_blocks > 1 else 1)
    half = case.key.dtype is not torch.float32
    for number, kernel in enumerate(found):
        assert violations(kernel, bound_of(case.config, number), may_spill=not half) == []
        assert narrow_loads(kernel) == {}
        assert (kernel.async_copies > 0) == (case.config.num_stages > 1)
        # The grid goes by registers alone.
        grid = resident_grid(case.config, num_sms=1)
        assert resident_programs(kernel) >= (grid.wide_programs if number else grid.num_programs)
        # Too few rows for Hopper's warp groups, whose sums have another order.
        assert kernel.wgmma == 0
        assert (kernel.mma_sync > 0) == half


@EVERY_CASE
def test_the_wide_form_computes_as_the_narrow_one(
    kernels: dict[str, list[CompiledKernel] | str], case: AttentionCase
) -> None:
    """Else a row's bits would depend on whom it shares its keys with. The wide form does it `row_blocks` times."""
    found = kernels[case_name(case)]
    assert not isinstance(found, str), found
    (narrow,) = found[0].loops
    for kernel in found[1:]:
        (wide,) = kernel.loops
        assert wide.exponents == narrow.exponents
        assert wide.arithmetic == tuple((name, count * case.config.row_blocks) for name, count in narrow.arithmetic)
