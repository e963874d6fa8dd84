"""The runner's bits, dry: the interpreter has no graphs, so both runners launch alike there."""

from __future__ import annotations

import torch

from sapwood_bench.kernels.device import measured_device
from sapwood_bench.kernels.model_bits import check_bits, difference


def test_every_check_holds_in_the_interpreter() -> None:
    checks = list(check_bits(measured_device(dry=True)))
    assert [check.problem for check in checks] == [""] * 5


def test_one_bit_is_a_difference() -> None:
    wanted = torch.zeros(2, 3)
    assert difference(wanted, wanted) == ""
    found = wanted.clone()
    found[1, 2] = -0.0
    assert difference(found, wanted) == "1 of 6 logits differ"
