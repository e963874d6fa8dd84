"""Packed products against dense ones of the same numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from sapwood_server.model.dtype import read_cpu_flags
from sapwood_server.model.linear import (
    MAX_INT4_ROWS,
    PLAIN_FORMS,
    BlockedLinear,
    FixedRowsLinear,
    Int4Linear,
    Linear,
    LinearForms,
    find_linear_forms,
    find_problem,
    make_linear,
)
from sapwood_server.model.matrix import Matrix, PackedQ4


def random_q4(rows: int, columns: int) -> tuple[Tensor, PackedQ4]:
    """fp32 weights and the integers behind them, as Q4_1 has them."""
    generator = torch.Generator().manual_seed(0)
    quants = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = torch.rand(rows, columns // 32, generator=generator) * 0.02 + 0.001
    minimum = -8 * scale + torch.randn(rows, columns // 32, generator=generator) * 0.01
    dense = quants * scale.repeat_interleave(32, 1) + minimum.repeat_interleave(32, 1)
    return dense, PackedQ4(quants, scale, minimum)


def inputs(num_rows: int, columns: int) -> Tensor:
    return torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("num_rows", [1, 2, MAX_INT4_ROWS, MAX_INT4_ROWS + 1, 33])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 64), (960, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_all_forms_agree(num_rows: int, rows: int, columns: int, biased: bool) -> None:
    dense, packed = random_q4(rows, columns)
    bias = torch.randn(rows).to(torch.bfloat16) if biased else None
    x = inputs(num_rows, columns)
    wanted = torch.nn.functional.linear(x.float(), dense, None if bias is None else bias.float())
    plain = Linear(dense.to(torch.bfloat16), bias)
    linears = [plain, Int4Linear(plain, packed, bias)]
    if find_linear_forms()[0].blocked:
        linears.append(BlockedLinear(dense.to(torch.bfloat16), bias))
    for linear in linears:
        found = linear(x)
        assert found.dtype == torch.bfloat16
        assert relative_error(found, wanted) < 0.015


def test_few_rows_take_the_packed_weights() -> None:
    """Told apart by dense weights that are not the packed ones."""
    _, packed = random_q4(32, 64)
    linear = Int4Linear(Linear(torch.zeros(32, 64, dtype=torch.bfloat16)), packed)
    for num_rows, is_packed in ((1, True), (MAX_INT4_ROWS, True), (MAX_INT4_ROWS + 1, False)):
        assert bool(linear(inputs(num_rows, 64)).any()) is is_packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(24, 40), (960, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_fixed_rows_give_a_row_the_same_bits(dtype: torch.dtype, rows: int, columns: int, biased: bool) -> None:
    """In every number of rows, at every place, beside every other row."""
    dense = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)) / columns**0.5).to(dtype)
    bias = dense[:, 0].clone() if biased else None
    blocked = dtype == torch.bfloat16 and find_linear_forms()[0].blocked
    linear = make_linear(Matrix(dense), bias, LinearForms(blocked=blocked, int4=False, fixed_rows=True))
    x = inputs(100, columns).to(dtype)
    whole = linear(x)
    assert whole.shape == (100, rows)
    wanted = torch.nn.functional.linear(x.float(), dense.float(), None if bias is None else bias.float())
    assert relative_error(whole, wanted) < 0.01
    for first, last in ((0, 1), (5, 6), (16, 17), (3, 5), (2, 18), (1, 65), (0, 16), (9, 100)):
        assert torch.equal(linear(x[first:last].clone()), whole[first:last]), (first, last)


def test_without_fixed_rows_bits_differ() -> None:
    """What they are for; and the comparison above can fail."""
    x, linear = inputs(100, 576).float(), Linear(torch.randn(960, 576))
    assert not torch.equal(linear(x[:1].clone()), linear(x)[:1])


def test_which_form_a_matrix_gets() -> None:
    dense, packed = random_q4(32, 64)
    odd, odd_packed = random_q4(24, 64)
    matrix = Matrix(dense.to(torch.bfloat16), packed=packed)
    both = LinearForms(blocked=True, int4=True)
    cases = [
        (matrix, both, Int4Linear),
        (matrix, LinearForms(blocked=False, int4=True), Int4Linear),
        (matrix, LinearForms(blocked=True, int4=False), BlockedLinear),
        (matrix, PLAIN_FORMS, Linear),
        (Matrix(dense.to(torch.bfloat16)), both, BlockedLinear),
        (Matrix(odd.to(torch.bfloat16), packed=odd_packed), both, BlockedLinear),
    ]
    for case, forms, kind in cases:
        assert type(make_linear(case, None, forms)) is kind
        assert type(make_linear(case, None, dataclasses.replace(forms, fixed_rows=True))) is FixedRowsLinear


def test_a_form_that_is_not_used_has_a_reason() -> None:
    forms, problems = find_linear_forms()
    lacking = [name for name in ("blocked", "int4") if not getattr(forms, name)]
    assert [problem.split(":")[0] for problem in problems] == lacking
    if "amx_bf16" in (read_cpu_flags() or ()):
        assert lacking == []


class RightForFewRows(Linear):
    """As a broken kernel for many rows would be."""

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        return y if len(x) < 16 else y + 4


def test_a_form_is_used_only_if_it_is_right_for_few_rows_and_many() -> None:
    dense = random_q4(32, 64)[0].to(torch.bfloat16)
    assert find_problem(lambda: Linear(dense), dense) is None
    assert find_problem(lambda: Linear(dense + 1), dense) == "wrong numbers"
    assert find_problem(lambda: RightForFewRows(dense), dense) == "wrong numbers"


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, TypeError])
def test_whatever_another_torch_says_is_a_reason_not_an_end(error: type[Exception]) -> None:
    def make() -> Linear:
        raise error("no such\n  op")

    assert find_problem(make, torch.zeros(32, 64, dtype=torch.bfloat16)) == "no such op"
