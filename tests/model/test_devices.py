"""Which device runs a model: what is asked for against what is there."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sapwood_server.errors import StartupError
from sapwood_server.model.devices import (
    DeviceFacts,
    DeviceKind,
    check_deterministic,
    choose_device,
    read_device_facts,
)

NOTHING = DeviceFacts(has_triton=False, triton_interprets=False)
HOPPER = DeviceFacts(has_triton=True, triton_interprets=False, gpu_name="H200", capability=(9, 0))
TURING = dataclasses.replace(HOPPER, gpu_name="T4", capability=(7, 5))
BLACKWELL = dataclasses.replace(HOPPER, gpu_name="B200", capability=(10, 0))
NO_TRITON = dataclasses.replace(HOPPER, has_triton=False)
INTERPRETED = dataclasses.replace(HOPPER, triton_interprets=True)


@pytest.mark.parametrize(
    ("asked", "facts", "kind", "reason"),
    [
        ("auto", HOPPER, DeviceKind.CUDA, "torch and triton can use it"),
        ("cuda", HOPPER, DeviceKind.CUDA, "--device asks for it"),
        ("cuda", BLACKWELL, DeviceKind.CUDA, "though nobody has tried the kernels on such a GPU"),
        ("auto", BLACKWELL, DeviceKind.CPU, "B200 has compute capability 10.0, which is untried"),
        ("cpu", HOPPER, DeviceKind.CPU, "--device asks for it"),
        ("auto", NOTHING, DeviceKind.CPU, "torch finds no CUDA GPU"),
        ("auto", TURING, DeviceKind.CPU, "T4 has compute capability 7.5 (accepted: 8.0 or higher)"),
        ("auto", NO_TRITON, DeviceKind.CPU, "triton is not installed (pip install 'sapwood[cuda]')"),
        ("auto", INTERPRETED, DeviceKind.CPU, "TRITON_INTERPRET=1"),
        ("interpreter", INTERPRETED, DeviceKind.INTERPRETER, "--device asks for it"),
    ],
)
def test_choices(asked: str, facts: DeviceFacts, kind: DeviceKind, reason: str) -> None:
    choice = choose_device(asked, facts)
    assert choice.kind is kind
    assert reason in choice.reason
    assert choice.torch_device.type == ("cuda" if kind is DeviceKind.CUDA else "cpu")
    assert (f"{facts.gpu_name}, compute capability " in choice.detail) == (kind is DeviceKind.CUDA)


@pytest.mark.parametrize(
    ("asked", "facts", "message"),
    [
        ("cuda", NOTHING, "--device is cuda, but torch finds no CUDA GPU"),
        ("cuda", TURING, r"--device is cuda, but T4 has compute capability 7\.5 \(accepted: 8\.0 or higher\)"),
        ("cuda", NO_TRITON, "--device is cuda, but triton is not installed"),
        ("cuda", INTERPRETED, "--device is cuda, but TRITON_INTERPRET=1"),
        ("interpreter", NOTHING, "--device is interpreter, but triton is not installed"),
        ("interpreter", HOPPER, "--device is interpreter, which needs TRITON_INTERPRET=1"),
    ],
)
def test_a_device_that_cannot_be_used_is_one_line(asked: str, facts: DeviceFacts, message: str) -> None:
    with pytest.raises(StartupError, match=message) as raised:
        choose_device(asked, facts)
    assert "\n" not in str(raised.value)


def test_determinism_is_refused_where_products_may_depend_on_the_number_of_rows() -> None:
    ampere = dataclasses.replace(HOPPER, gpu_name="A100", capability=(8, 0))
    with pytest.raises(StartupError, match=r"A100, compute capability 8\.0 .* \(accepted: --device cpu\)"):
        check_deterministic(choose_device("cuda", ampere))
    with pytest.raises(StartupError, match=r"B200, compute capability 10\.0"):
        check_deterministic(choose_device("cuda", BLACKWELL))
    check_deterministic(choose_device("cuda", HOPPER))
    check_deterministic(choose_device("cpu", ampere))
    check_deterministic(choose_device("interpreter", INTERPRETED))


def test_the_facts_are_this_machines() -> None:
    facts = read_device_facts()
    assert facts.triton_interprets, "the whole suite runs kernels in the interpreter"
    assert (facts.gpu_name is not None) == torch.cuda.is_available()
