"""What the machine does at best: a large copy and a large matrix product."""

from __future__ import annotations

import torch

from sapwood_bench.kernels.device import Device
from sapwood_bench.kernels.results import Ceilings, Failure
from sapwood_bench.kernels.timing import Contender, time_contenders

COPY_BYTES = 4 * 2**30
MM_SIZE = 8192
_TINY_COPY_BYTES, _TINY_MM_SIZE = 2**16, 64


def measure_ceilings(device: Device) -> Ceilings:
    """Bytes read and written by a copy of COPY_BYTES, operations of a bf16 product of MM_SIZE cubed on random numbers
    (on zeros a GPU draws less power and runs faster). Raises RuntimeError if one can't be run."""
    num_bytes, size = (_TINY_COPY_BYTES, _TINY_MM_SIZE) if device.dry else (COPY_BYTES, MM_SIZE)
    generator = torch.Generator(device.torch_device).manual_seed(0)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator, device=device.torch_device)
    target = torch.empty_like(source)
    left, right = (
        torch.randn(size, size, generator=generator, device=device.torch_device).bfloat16() for _ in range(2)
    )
    product = torch.empty_like(left)
    contenders = [
        Contender("copy", [lambda: target.copy_(source)]),
        Contender("mm", [lambda: torch.mm(left, right, out=product)]),
    ]
    times = time_contenders(contenders, device.prepare)
    copy_us, mm_us = times["copy"], times["mm"]
    if isinstance(copy_us, Failure) or isinstance(mm_us, Failure):
        raise RuntimeError(f"the ceilings could not be measured: copy {copy_us}, matrix product {mm_us}")
    return Ceilings(copy_tb_s=2 * num_bytes / copy_us / 1e6, mm_tf_s=2 * size**3 / mm_us / 1e6)
