"""Packed products against dense ones of the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sapwood_server.model.linear import (
    MAX_PACKED_ROWS,
    Int4Linear,
    Int8Linear,
    Linear,
    make_linear,
    packed_ops_problem,
)
from sapwood_server.model.matrix import Matrix, PackedQ4, PackedQ8


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


@pytest.mark.parametrize("num_rows", [1, 2, MAX_PACKED_ROWS, MAX_PACKED_ROWS + 1, 33])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 64), (960, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_and_dense_agree(num_rows: int, rows: int, columns: int, biased: bool) -> None:
    dense, packed = random_q4(rows, columns)
    bias = torch.randn(rows).to(torch.bfloat16) if biased else None
    x = inputs(num_rows, columns)
    wanted = torch.nn.functional.linear(x.float(), dense, None if bias is None else bias.float())
    bf16 = dense.to(torch.bfloat16)
    for linear in (Int4Linear(bf16, packed, bias), Int8Linear(bf16, bias), Linear(bf16, bias)):
        found = linear(x)
        assert found.dtype == torch.bfloat16
        assert relative_error(found, wanted) < 0.015


def test_few_rows_take_the_packed_weights() -> None:
    """Told apart by dense weights that are not the packed ones."""
    _, packed = random_q4(32, 64)
    zeros = torch.zeros(32, 64, dtype=torch.bfloat16)
    for num_rows, is_packed in ((1, True), (MAX_PACKED_ROWS, True), (MAX_PACKED_ROWS + 1, False)):
        assert bool(Int4Linear(zeros, packed)(inputs(num_rows, 64)).any()) is is_packed


def test_rows_of_zeros_stay_zeros() -> None:
    weights = torch.zeros(16, 32, dtype=torch.bfloat16)
    weights[3] = 1.0
    found = Int8Linear(weights)(torch.ones(1, 32, dtype=torch.bfloat16))
    assert found[0, 3] == 32.0
    assert int((found != 0).sum()) == 1


def test_which_form_a_matrix_gets() -> None:
    dense, packed = random_q4(32, 64)
    bf16 = dense.to(torch.bfloat16)
    int8 = PackedQ8(torch.zeros(32, 64, dtype=torch.int8), torch.ones(32, 2))
    odd, odd_packed = random_q4(24, 64)
    cases = [
        (Matrix(bf16, packed=packed), True, Int4Linear),
        (Matrix(bf16, packed=packed), False, Linear),
        (Matrix(bf16, int8=int8), True, Int8Linear),
        (Matrix(bf16), True, Linear),
        (Matrix(odd.to(torch.bfloat16), packed=odd_packed), True, Linear),
    ]
    for matrix, allowed, kind in cases:
        assert type(make_linear(matrix, None, allowed)) is kind


def test_this_torch_has_packed_products() -> None:
    assert packed_ops_problem() is None
