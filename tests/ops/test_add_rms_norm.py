"""K5 in Triton's interpreter: against the formula, row by row, and at shapes that no block fits."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from sapwood_kernels import add_rms_norm as add_rms_norm_module
from sapwood_kernels import reference
from support.isolated import run_isolated
from support.mutants import Mutant, survivors
from support.ops import assert_close, random_tensor
from support.scale import scaled

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = ((1, 1), (3, 33), (2, 576), (5, 1000), (1, 4096))
"""(num_tokens, hidden)."""


def check_sizes(module: ModuleType, dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    x = random_tensor(num_tokens, hidden, dtype=dtype)
    weight = random_tensor(hidden, seed=2)
    mine, theirs = (random_tensor(num_tokens, hidden, seed=1) * 3 for _ in range(2))
    plain = module.rms_norm(mine, weight, 1e-2, dtype)
    # The interpreter cuts off where bf16 should be rounded.
    factor = 2.0 if dtype == torch.bfloat16 else 1.0
    assert_close(plain, reference.rms_norm(theirs, weight, 1e-2, dtype), factor)
    wanted = reference.add_rms_norm(x.clone(), theirs, weight, 1e-2)
    found = module.add_rms_norm(x, mine, weight, 1e-2)
    assert found.data_ptr() == x.data_ptr()
    assert_close(found, wanted, factor)
    assert torch.equal(mine, theirs)


def check_rows(module: ModuleType) -> None:
    """A token alone has the bits that it has among 17; rows may lie apart, with anything between them."""
    weight = random_tensor(100, seed=2)
    x, residual = (torch.full((17, 128), float("nan"), dtype=torch.float32) for _ in range(2))
    x[:, :100], residual[:, :100] = random_tensor(17, 100), random_tensor(17, 100, seed=1)
    alone = [(x[i : i + 1, :100].clone(), residual[i : i + 1, :100].clone()) for i in range(17)]
    found = module.add_rms_norm(x[:, :100], residual[:, :100], weight, 1e-6)
    rows = [module.add_rms_norm(*row, weight, 1e-6) for row in alone]
    assert torch.equal(found, torch.cat(rows))
    assert torch.equal(residual[:, :100], torch.cat([row for _, row in alone]))
    assert x[:, 100:].isnan().all()
    assert residual[:, 100:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden"), SIZES)
def test_norms(dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    check_sizes(add_rms_norm_module, dtype, num_tokens, hidden)


def test_a_token_does_not_depend_on_the_others() -> None:
    check_rows(add_rms_norm_module)


def test_no_tokens_and_zeros() -> None:
    weight = torch.ones(8)
    assert add_rms_norm_module.rms_norm(torch.empty(0, 8), weight, 1e-6, torch.float16).shape == (0, 8)
    assert torch.equal(add_rms_norm_module.rms_norm(torch.zeros(2, 8), weight, 1e-6, torch.float32), torch.zeros(2, 8))


def check_far_rows() -> None:
    """A second row more than 2 ** 31 elements behind the first."""
    rows = [torch.empty(2**31 + 128).as_strided((2, 64), (2**31 + 64, 1)) for _ in range(2)]
    x, residual = rows
    x[:], residual[:] = random_tensor(2, 64), random_tensor(2, 64, seed=1)
    wanted = reference.add_rms_norm(x.clone(), residual.clone(), torch.ones(64), 1e-5)
    assert_close(add_rms_norm_module.add_rms_norm(x, residual, torch.ones(64), 1e-5), wanted)


def test_offsets_past_2_31_elements() -> None:
    run_isolated(check_far_rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3)}, "x has shape"),
        ({"x": torch.zeros(2, 8, dtype=torch.float64)}, "x is torch.float64; accepted: torch.float32"),
        ({"x": torch.zeros(8, 2).T}, "x has strides"),
        ({"x": torch.zeros(2, 0)}, "x has shape .* accepted: 1 to 65536 columns"),
        ({"weight": torch.zeros(7)}, "weight has shape"),
        ({"weight": torch.zeros(8, dtype=torch.bfloat16)}, "weight is torch.bfloat16; accepted: torch.float32"),
        ({"residual": torch.zeros(3, 8)}, "residual has shape"),
        ({"residual": torch.zeros(2, 8, dtype=torch.float16)}, "residual is torch.float16; accepted: torch.float32"),
        ({"residual": torch.zeros(8, 2).T}, "residual has strides"),
        ({"residual": torch.zeros(2, 8, device="meta")}, "residual is on meta; accepted: cpu"),
    ],
)
def test_bad_input_is_named(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"x": torch.zeros(2, 8), "residual": torch.zeros(2, 8), "weight": torch.zeros(8)} | change
    with pytest.raises(ValueError, match=message):
        add_rms_norm_module.add_rms_norm(**arguments, eps=1e-5)
    if "residual" not in change:
        del arguments["residual"]
        with pytest.raises(ValueError, match=message):
            add_rms_norm_module.rms_norm(**arguments, eps=1e-5, dtype=torch.float32)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch.int32; accepted: torch.float32"):
        add_rms_norm_module.rms_norm(torch.zeros(1, 8), torch.zeros(8), 1e-5, torch.int32)


MUTANTS = [
    Mutant("sapwood_kernels.add_rms_norm", old=old, new=new)
    for old, new in (
        ("inside = columns < HIDDEN", "inside = columns < BLOCK"),
        ("/ HIDDEN + eps", "/ BLOCK + eps"),
        ("/ HIDDEN + eps", "/ HIDDEN"),
        ("residual + token * residual_stride", "residual + token * x_stride * 0"),
        ("        tl.store(where, row, mask=inside)\n", ""),
        ("out + token * out_stride", "out + token * HIDDEN"),
    )
]


def checks(module: ModuleType) -> None:
    check_sizes(module, torch.float32, 3, 33)
    check_rows(module)


def test_the_checks_notice_a_broken_kernel() -> None:
    assert survivors(MUTANTS[: scaled(len(MUTANTS), 2)], checks) == []
