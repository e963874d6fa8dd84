"""When kernels load as fp32 before they multiply."""

from __future__ import annotations

import torch
import triton

from sapwood_kernels.interpreted import must_upcast


def test_only_the_interpreter_upcasts_and_only_what_it_cannot_multiply() -> None:
    half, single, brain = torch.zeros(1).half(), torch.zeros(1), torch.zeros(1).bfloat16()
    assert not must_upcast(half, single)
    assert must_upcast(half, brain)
    assert must_upcast(half, half.to(torch.float8_e4m3fn))
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        assert not must_upcast(brain)
