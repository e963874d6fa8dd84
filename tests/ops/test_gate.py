"""The compile gate sees what it is for: spills, narrow loads, and a contraction that only one loop has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sapwood_kernels.gate import CompiledKernel, compile_launch, violations
from support.gate_process import in_gate_process
from support.toy_attention import launch_toy

ToyCase = tuple[int, dict[str, int | bool]]

SOUND: dict[str, int | bool] = {}
SPILLING: dict[str, int | bool] = {"head_dim": 256, "num_stages": 2}
NARROW: dict[str, int | bool] = {"stride": 129}
CONTRACTED: dict[str, int | bool] = {"fusion": True}
CASES: list[ToyCase] = [(90, SOUND), (80, SOUND), (80, SPILLING), (90, NARROW), (90, CONTRACTED), (90, {"rows": 16})]


def compile_toy(case: ToyCase) -> list[CompiledKernel]:
    arch, changes = case
    return compile_launch(arch, lambda: launch_toy(**changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def kernels(triton_cache: Path) -> dict[str, CompiledKernel]:
    """Each case, compiled, by what is done to it and where."""
    found = in_gate_process(compile_toy, CASES, triton_cache)
    assert [len(launched) for launched in found] == [1] * len(CASES)
    return {f"{arch} {changes}": kernel for (arch, changes), (kernel,) in zip(CASES, found, strict=True)}


def test_a_sound_kernel_passes(kernels: dict[str, CompiledKernel]) -> None:
    for arch in (80, 90):
        kernel = kernels[f"{arch} {SOUND}"]
        assert (kernel.name, kernel.arch, kernel.stack_bytes) == ("_toy", arch, 0)
        assert kernel.async_copies > 0
        assert set(kernel.global_loads) == {16}
        assert violations(kernel, 255) == []


def test_the_loops_of_a_sound_kernel_compute_alike(kernels: dict[str, CompiledKernel]) -> None:
    unmasked, masked = kernels[f"90 {SOUND}"].loops
    assert unmasked == masked
    assert unmasked.exponents == ("sub.rn.f32(mul.rn.f32(x, x), x)", "sub.rn.f32(x, x)")


def test_hopper_multiplies_128_rows_by_warp_groups_and_16_by_warps(kernels: dict[str, CompiledKernel]) -> None:
    wide, narrow, ampere = kernels[f"90 {SOUND}"], kernels["90 {'rows': 16}"], kernels[f"80 {SOUND}"]
    assert (wide.wgmma > 0, wide.mma_sync) == (True, 0)
    assert (narrow.wgmma, narrow.mma_sync > 0) == (0, True)
    assert (ampere.wgmma, ampere.mma_sync > 0) == (0, True)


def test_a_spill_is_seen(kernels: dict[str, CompiledKernel]) -> None:
    spilling = kernels[f"80 {SPILLING}"]
    assert violations(spilling, 255) == [f"spills {spilling.stack_bytes} bytes a thread"]
    assert violations(spilling, 255, may_spill=True) == []


def test_strides_that_16_does_not_divide_show_as_narrow_loads(kernels: dict[str, CompiledKernel]) -> None:
    narrow = kernels[f"90 {NARROW}"]
    assert narrow.async_copies == 0
    assert min(narrow.global_loads) == 2


def test_a_contraction_in_one_loop_is_seen(kernels: dict[str, CompiledKernel]) -> None:
    unmasked, masked = kernels[f"90 {CONTRACTED}"].loops
    assert unmasked.exponents != masked.exponents
    assert "fma.rn.f32(x, x, neg.f32(x))" in unmasked.exponents


def test_bounds_are_named_with_what_was_seen(kernels: dict[str, CompiledKernel]) -> None:
    kernel = dataclasses.replace(kernels[f"90 {SOUND}"], registers=200, shared_bytes=232449)
    assert violations(kernel, 200) == ["has 232449 bytes of shared memory; 90 has 232448"]
    assert violations(kernel, 199)[0] == "has 200 registers a thread; its bound is 199"


def test_the_interpreter_is_no_compiler() -> None:
    with pytest.raises(RuntimeError, match="a process without TRITON_INTERPRET"):
        compile_launch(90, launch_toy)


def launch_nothing(arch: int) -> str:
    try:
        compile_launch(arch, lambda: None)
    except RuntimeError as error:
        return str(error)
    return "it passed"


def test_a_launcher_that_launches_nothing_is_no_pass(triton_cache: Path) -> None:
    assert in_gate_process(launch_nothing, [90], triton_cache) == ["nothing was launched"]
