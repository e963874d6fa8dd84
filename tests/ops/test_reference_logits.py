"""The formulas for logits against published numbers and arithmetic by hand."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from sapwood_kernels import logits_prepare, reference_logits, sample
from sapwood_kernels.sample import SamplingTensors


def filters(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.tensor([temperature]),
        top_k=torch.tensor([top_k], dtype=torch.int32),
        top_p=torch.tensor([top_p]),
        min_p=torch.tensor([min_p]),
        seed=torch.zeros(1, dtype=torch.int64),
        choice=torch.zeros(1, dtype=torch.int32),
        position=torch.zeros(1, dtype=torch.int32),
    )


def test_kernels_and_formulas_have_one_signature() -> None:
    assert inspect.signature(reference_logits.sample) == inspect.signature(sample.sample)
    assert inspect.signature(reference_logits.logits_prepare) == inspect.signature(logits_prepare.logits_prepare)


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    found = reference_logits.philox(np.array(counter, dtype=np.uint64)[:, None], key)
    assert tuple(found[:, 0].tolist()) == wanted


def test_probabilities_by_hand() -> None:
    """Of 8/15, 4/15, 2/15, 1/15: top-k renormalises before top-p; at least one token is kept."""
    logits = torch.log(torch.tensor([2.0, 8.0, 1.0, 4.0]))

    def kept(**values: float) -> list[float]:
        return [round(float(p), 6) for p in reference_logits.probabilities(logits, filters(**values), 0)]  # type: ignore[arg-type]

    assert kept() == [0.133333, 0.533333, 0.066667, 0.266667]
    assert kept(top_k=2) == [0, 0.666667, 0, 0.333333]
    assert kept(top_p=0.6) == [0, 0.666667, 0, 0.333333]
    assert kept(top_k=2, top_p=0.6) == [0, 1, 0, 0]
    assert kept(min_p=0.2) == [0.142857, 0.571429, 0, 0.285714]
    assert kept(top_p=0.0) == [0, 1, 0, 0]
    assert kept(temperature=0.5, top_k=2) == [0, 0.8, 0, 0.2]


def test_exponentials_have_mean_and_deviation_one() -> None:
    times = reference_logits.exponentials(2**64 - 1, 3, 12345, 100_000)
    assert times.min() > 0
    assert abs(times.mean() - 1) < 0.02
    assert abs(times.std() - 1) < 0.03
