"""Room for partials: its size, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sapwood_kernels.partials import MAX_BYTES, allocate_partials, check_partials

CPU = torch.device("cpu")


def test_room_is_dense_and_passes_its_own_check() -> None:
    partials = allocate_partials(5, 3, 64, CPU)
    assert (partials.maximum.shape, partials.total.shape, partials.acc.shape) == ((5, 3), (5, 3), (5, 3, 64))
    assert all(part.is_contiguous() for part in (partials.maximum, partials.total, partials.acc))
    check_partials(partials, 5, 3, 64, CPU)


def test_a_workspace_of_absurd_size_is_refused() -> None:
    """256 rows of 131,072 keys, 32 heads of 128, are allowed; ten times that is a mistake."""
    capacity = 256 * 512
    assert 4 * capacity * 32 * 130 < MAX_BYTES
    with pytest.raises(ValueError, match=f"take {40 * capacity * 32 * 130} bytes; accepted: up to {MAX_BYTES}"):
        allocate_partials(10 * capacity, 32, 128, CPU)


@pytest.mark.parametrize(
    ("sizes", "message"), [((0, 3, 64), "capacity"), ((5, 0, 64), "num_heads"), ((5, 3, 0), "head_dim")]
)
def test_no_room_at_all_is_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} is 0; accepted: 1 or more"):
        allocate_partials(*sizes, CPU)


def test_tensors_that_do_not_fit_are_named() -> None:
    partials = allocate_partials(5, 3, 64, CPU)
    for message, changed in (
        ("partials.maximum is torch.float64", replace(partials, maximum=partials.maximum.double())),
        ("partials.total has shape", replace(partials, total=partials.total[:4])),
        ("partials.acc has shape", replace(partials, acc=partials.acc[..., :63])),
        ("partials.acc has strides", replace(partials, acc=partials.acc.mT.contiguous().mT)),
        ("partials.total is on meta; accepted: cpu", replace(partials, total=partials.total.to("meta"))),
        ("partials.total has strides", replace(partials, total=torch.empty(5, 4)[:, :3])),
    ):
        with pytest.raises(ValueError, match=message):
            check_partials(changed, 5, 3, 64, CPU)
    with pytest.raises(ValueError, match="acc has room for 5; accepted: 6 or more"):
        check_partials(partials, 6, 3, 64, CPU)
