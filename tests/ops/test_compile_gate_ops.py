"""The ops without a config of their own compile for sm_80 and sm_90, without a GPU and without spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from sapwood_kernels.gate import CompiledKernel, violations
from support.gate_ops import LAUNCHES, compile_op
from support.gate_process import in_gate_process
from support.scale import suite_scale

# e4m3 takes sm_89; `make test` leaves out sm_80, for time.
CASES = [
    (arch, name)
    for arch in ((90, 80) if suite_scale() == 1 else (90,))
    for name in LAUNCHES
    if arch >= 89 or "e4m3" not in name
]


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> dict[tuple[int, str], list[CompiledKernel] | str]:
    return dict(zip(CASES, in_gate_process(compile_op, CASES, triton_cache), strict=True))


@pytest.mark.parametrize("case", CASES, ids=[f"{name} sm_{arch}" for arch, name in CASES])
def test_an_op_compiles_without_spills(
    kernels: dict[tuple[int, str], list[CompiledKernel] | str], case: tuple[int, str]
) -> None:
    found = kernels[case]
    assert not isinstance(found, str), found
    assert len(found) == (2 if case[1] == "logits_prepare" else 1)
    for kernel in found:
        assert violations(kernel, 255) == []
        assert max(kernel.global_loads) == (16 if case[1] not in ("logits_prepare", "merge_splits") else 4)
