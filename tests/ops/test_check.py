"""What ops say to inputs that can't be."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from sapwood_kernels import reference
from sapwood_kernels.check import check_dtype, check_heads, check_indices, check_kv, check_shape
from sapwood_kernels.values import HeadNorms, PagedSequence
from support.ops import make_kv

ZEROS = torch.zeros


def kv() -> torch.Tensor:
    return make_kv(4, 2, 16, 8, torch.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_shape("q", ZEROS(2, 3), (2, 4)), "q has shape [2, 3]; accepted: [2, 4]"),
        (lambda: check_shape("q", ZEROS(2), (None, 3)), "q has shape [2]; accepted: [any, 3]"),
        (
            lambda: check_dtype("q", ZEROS(1, dtype=torch.int8), (torch.float32, torch.float16)),
            "q is torch.int8; accepted: torch.float32, torch.float16",
        ),
        (lambda: check_indices("slots", torch.tensor([3, 16]), 4, 16), "slots holds 3 to 16; accepted: 4 to 15"),
        (lambda: check_indices("slots", ZEROS(1), 0, 1), "slots is torch.float32; accepted: torch.int64"),
        (lambda: check_heads(5, 2), "5 query heads over 2 key-value heads"),
        (lambda: check_kv(ZEROS(4, 1, 2, 16, 8)), "kv has shape [4, 1, 2, 16, 8]; accepted: [any, 2, any, any, any]"),
    ],
)
def test_checks_name_the_tensor(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reference.rms_norm(ZEROS(2, 3), ZEROS(4), 1e-5, torch.float32), "weight has shape [4]"),
        (lambda: reference.add_rms_norm(ZEROS(2, 3), ZEROS(1, 3), ZEROS(3), 1e-5), "residual has shape [1, 3]"),
        (lambda: reference.silu_mul(ZEROS(1, 3)), "gate_up has 3 columns"),
        (lambda: rope(columns=50), "qkv has 50 columns; accepted: a multiple of head_dim, 8"),
        (lambda: rope(columns=32), "0 query heads over 2 key-value heads"),
        (lambda: rope(slot=15), "slots holds 15 to 15; accepted: 16 to 63"),
        (lambda: rope(slot=64), "slots holds 64 to 64"),
        (lambda: rope(angles=6), "cos_sin has shape [1, 6]; accepted: [1, 8]"),
        (lambda: sequence(num_queries=0), "num_queries is 0; accepted: 1 to num_keys, 3"),
        (lambda: sequence(num_queries=4), "num_queries is 4; accepted: 1 to num_keys, 3"),
        (lambda: sequence(page=0), "pages holds 0 to 0"),
    ],
)
def test_ops_refuse_what_does_not_fit(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def rope(columns: int = 64, slot: int = 16, angles: int = 8) -> None:
    norms: HeadNorms | None = None
    reference.rope_kv_store(ZEROS(1, columns), ZEROS(1, angles), torch.tensor([slot]), kv(), norms)


def sequence(num_queries: int = 1, page: int = 1) -> None:
    PagedSequence(0, num_queries, torch.tensor([page]), 3, torch.float32)
