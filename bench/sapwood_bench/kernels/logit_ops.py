"""The ops on logits, as trials: half of the vocabulary masked, and drawing with every filter on."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from sapwood_bench.kernels.accounting import logits_prepare_bytes, sample_bytes
from sapwood_bench.kernels.trials import OpSizes, Trial
from sapwood_kernels import reference_logits
from sapwood_kernels.logits_prepare import logits_prepare
from sapwood_kernels.sample import SamplingTensors, sample


def logits_prepare_trial(num_rows: int, sizes: OpSizes, generator: torch.Generator, dtype: torch.dtype) -> Trial:
    """A grammar's mask that forbids every other token on average. Logits are fp32, whatever `dtype`."""
    device = generator.device
    logits = random_logits(num_rows, sizes, generator)
    words = -(-sizes.num_tokens // 32)
    bitmask = torch.randint(-(2**31), 2**31, (num_rows, words), dtype=torch.int32, generator=generator, device=device)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    bits = (bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    allowed = torch.nn.functional.pad(bits.flatten(1)[:, : sizes.num_tokens], (0, sizes.vocabulary - sizes.num_tokens))

    def ours() -> tuple[Tensor, ...]:
        logits_prepare(logits, sizes.num_tokens, None, bitmask, rows)
        return (logits,)

    def wanted() -> tuple[Tensor, ...]:
        return (logits.masked_fill(allowed == 0, float("-inf")),)

    num_bytes = logits_prepare_bytes(num_rows, sizes.vocabulary, int((allowed == 0).sum()))
    return Trial(ours=ours, wanted=wanted, rivals={}, num_bytes=num_bytes)


def sample_trial(num_rows: int, sizes: OpSizes, generator: torch.Generator, dtype: torch.dtype) -> Trial:
    """Temperature 0.8, top_k 50, top_p 0.95, min_p 0.01. The rival is what a plain sampler in torch does."""
    logits = random_logits(num_rows, sizes, generator)
    settings = sampling_tensors(num_rows, generator.device)

    def torch_op() -> Tensor:
        scaled, ids = logits.topk(50, dim=-1)
        probabilities = torch.softmax(scaled / 0.8, dim=-1)
        mass = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(mass > 0.95, 0.0)
        return ids.gather(1, probabilities.multinomial(1))

    return Trial(
        ours=lambda: (sample(logits, settings),),
        wanted=lambda: (reference_logits.sample(logits.cpu(), on_cpu(settings)).to(logits.device),),
        rivals={"torch topk, multinomial": torch_op},
        num_bytes=sample_bytes(num_rows, sizes.vocabulary),
    )


def random_logits(num_rows: int, sizes: OpSizes, generator: torch.Generator) -> Tensor:
    """fp32 [num_rows, vocabulary], of a spread that models have."""
    return 3.0 * torch.randn(num_rows, sizes.vocabulary, generator=generator, device=generator.device)


def sampling_tensors(num_rows: int, device: torch.device) -> SamplingTensors:
    """Settings that have every filter work; each row has a seed of its own."""

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return SamplingTensors(
        temperature=full(0.8, torch.float32),
        top_k=full(50, torch.int32),
        top_p=full(0.95, torch.float32),
        min_p=full(0.01, torch.float32),
        seed=torch.arange(num_rows, dtype=torch.int64, device=device) * 7919 - 3,
        choice=full(0, torch.int32),
        position=full(5, torch.int32),
    )


def on_cpu(settings: SamplingTensors) -> SamplingTensors:
    """The same where the reference, which is numpy's, can read it."""
    return SamplingTensors(**{field.name: getattr(settings, field.name).cpu() for field in fields(settings)})
