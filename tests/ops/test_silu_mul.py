"""K6 in Triton's interpreter: against the formula, row by row, and at shapes that no block fits."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels import silu_mul as silu_mul_module
from support.isolated import run_isolated
from support.mutants import Mutant, survivors
from support.ops import assert_close, random_tensor
from support.scale import scaled

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_sizes(module: ModuleType, dtype: torch.dtype, num_tokens: int, size: int) -> None:
    gate_up = random_tensor(num_tokens, 2 * size, dtype=dtype) * 4
    assert_close(module.silu_mul(gate_up), reference.silu_mul(gate_up), factor=2)


def check_rows(module: ModuleType) -> None:
    """A token alone has the bits that it has among 17; rows may lie apart, with anything between them."""
    gate_up = torch.full((17, 2100), float("nan"))
    gate_up[:, :2098] = random_tensor(17, 2098)
    rows = [module.silu_mul(gate_up[i : i + 1, :2098].clone()) for i in range(17)]
    assert torch.equal(module.silu_mul(gate_up[:, :2098]), torch.cat(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 33), (2, 1024), (2, 1537)])
def test_silu_mul(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    check_sizes(silu_mul_module, dtype, num_tokens, size)


def test_a_token_does_not_depend_on_the_others() -> None:
    check_rows(silu_mul_module)


def test_large_gates_do_not_overflow() -> None:
    gates = torch.tensor([[-1e4, -200.0, -0.0, 0.0, 200.0, 1e4]])
    found = silu_mul_module.silu_mul(torch.cat((gates, torch.ones(1, 6)), dim=1))
    assert found.tolist() == [[0.0, 0.0, 0.0, 0.0, 200.0, 1e4]]


def test_no_tokens() -> None:
    assert silu_mul_module.silu_mul(torch.empty(0, 8)).shape == (0, 4)
    assert silu_mul_module.silu_mul(torch.empty(3, 0)).shape == (3, 0)


def check_far_rows() -> None:
    """A second row more than 2 ** 31 elements behind the first."""
    gate_up = torch.empty(2**31 + 128, dtype=torch.float16).as_strided((2, 64), (2**31 + 64, 1))
    gate_up[:] = random_tensor(2, 64, dtype=torch.float16)
    assert_close(silu_mul_module.silu_mul(gate_up), reference.silu_mul(gate_up.clone()), factor=2)


def test_offsets_past_2_31_elements() -> None:
    run_isolated(check_far_rows)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(4), "gate_up has shape"),
        (torch.zeros(2, 5), "gate_up has 5 columns; accepted: an even number"),
        (torch.zeros(2, 4, dtype=torch.float64), "gate_up is torch.float64; accepted"),
        (torch.zeros(4, 2).T, "gate_up has strides"),
    ],
)
def test_bad_input_is_named(gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        silu_mul_module.silu_mul(gate_up)


MUTANTS = [
    Mutant("sapwood_kernels.silu_mul", old=old, new=new)
    for old, new in (
        ("tl.where(gate < 0, grown, 1.0)", "tl.where(gate < 0, 1.0, grown)"),
        ("tl.load(row + size,", "tl.load(row + BLOCK,"),
        ("token * stride + columns", "token * 2 * size + columns"),
        ("tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK)"),
        ("columns < size", "columns < size - 1"),
    )
]


def checks(module: ModuleType) -> None:
    check_sizes(module, torch.float32, 2, 1537)
    check_rows(module)


def test_the_checks_notice_a_broken_kernel() -> None:
    assert survivors(MUTANTS[: scaled(len(MUTANTS), 2)], checks) == []
