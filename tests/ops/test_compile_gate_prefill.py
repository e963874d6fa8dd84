"""What `paged_prefill` becomes on sm_80 and sm_90, row by row of the config table, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sapwood_kernels.gate import CompiledKernel, violations
from sapwood_kernels.gate_cases import AttentionCase
from sapwood_kernels.values import AttentionPhase
from support.gate_table import case_name, compiled_cases, judged_cases, narrow_loads

CASES = judged_cases(AttentionPhase.PREFILL)
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=map(case_name, CASES))


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> dict[str, list[CompiledKernel] | str]:
    return compiled_cases(AttentionPhase.PREFILL, triton_cache)


@EVERY_CASE
def test_a_row_of_the_table_compiles_to_what_it_should(
    kernels: dict[str, list[CompiledKernel] | str], case: AttentionCase
) -> None:
    found = kernels[case_name(case)]
    assert not isinstance(found, str), found
    (kernel,) = found
    half = case.key.dtype is not torch.float32
    assert violations(kernel, case.config.max_registers, may_spill=not half) == []
    assert narrow_loads(kernel) == {}
    assert (kernel.async_copies > 0) == (case.config.num_stages > 1)
    # float32 is IEEE arithmetic, which no matrix instruction has.
    assert (kernel.wgmma > 0) == (half and case.key.arch == 90)
    assert (kernel.mma_sync > 0) == (half and case.key.arch != 90)


@EVERY_CASE
def test_masked_and_unmasked_loops_compute_alike(
    kernels: dict[str, list[CompiledKernel] | str], case: AttentionCase
) -> None:
    """Else a row's bits would depend on where its chunk starts."""
    found = kernels[case_name(case)]
    assert not isinstance(found, str), found
    loops = found[0].loops
    assert len(loops) == (3 if case.window else 2)
    assert len(set(loops)) == 1
