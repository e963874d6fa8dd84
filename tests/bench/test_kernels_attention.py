"""The fp64 oracle against the reference, torch's attention against both, and what inputs look like."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sapwood_bench.kernels.attention_speed import check_case, exact_outputs, time_case, worst_error
from sapwood_bench.kernels.cases import AttentionCase, Chunk, Heads, SharedRows
from sapwood_bench.kernels.device import Device, measured_device
from sapwood_bench.kernels.inputs import AttentionInputs, make_inputs
from sapwood_bench.kernels.oracle import exact_attention, relative_error
from sapwood_bench.kernels.rivals import DENSE_BYTES, dense_bytes, make_rivals, why_not
from sapwood_bench.kernels.targets import UNGROUPED
from sapwood_kernels.reference_attention import paged_prefill

CPU = torch.device("cpu")
HEADS = Heads("few", 4, 2, 64)
BASE = AttentionCase(name="few", heads=HEADS, dtype="float32")


@pytest.fixture(name="dry")
def dry_device() -> Device:
    return measured_device(dry=True)


def both_phases(**changes: object) -> AttentionCase:
    case = replace(BASE, decode=(33, 1, 70, 0), prefill=(Chunk(3, 3), Chunk(5, 40)), **changes)  # type: ignore[arg-type]
    return case


@pytest.mark.parametrize(
    "changes",
    [{}, {"window": 20}, {"softcap": 2.0}, {"sinks": True}, {"kv_dtype": "float8_e4m3fn"}],
    ids=["plain", "window", "softcap", "sinks", "e4m3"],
)
def test_the_oracle_is_the_reference(changes: dict[str, object]) -> None:
    inputs = make_inputs(both_phases(**changes), CPU)
    for part in (inputs.decode, inputs.prefill):
        assert part is not None
        wanted = paged_prefill(part.q, inputs.kv, part.batch, None, inputs.rule, inputs.scales)
        assert relative_error(wanted, exact_attention(inputs, part)) < 1e-6


def test_the_oracle_cuts_long_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(replace(BASE, prefill=(Chunk(30, 50),)), CPU)
    assert inputs.prefill is not None
    whole = exact_attention(inputs, inputs.prefill)
    monkeypatch.setattr("sapwood_bench.kernels.oracle.SCORE_ELEMENTS", 4 * 50 * 7)
    assert torch.equal(exact_attention(inputs, inputs.prefill), whole)


def test_an_error_is_relative_and_nan_is_infinite() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, float("nan")]), exact) == float("inf")


def filled(inputs: AttentionInputs, row: int) -> Tensor:
    """A decode row's keys and values by position."""
    assert inputs.decode is not None
    positions = torch.arange(int(inputs.decode.num_keys[row]))
    pages = torch.from_numpy(inputs.decode.block_table[row])[positions // 16].long()
    return inputs.kv[pages, :, :, positions % 16]


def test_placement_moves_pages_and_changes_no_key() -> None:
    case = replace(BASE, decode=(70, 64, 33), shared=(SharedRows(0, 2, 64),))
    here, there = (make_inputs(case, CPU, placement=place) for place in (0, 1))
    assert here.decode is not None
    assert there.decode is not None
    assert (here.decode.block_table != there.decode.block_table).any()
    for row in range(3):
        assert torch.equal(filled(here, row), filled(there, row))
    assert torch.equal(filled(here, 0)[:64], filled(here, 1))
    assert not torch.equal(filled(here, 0)[:33], filled(here, 2))


def test_slots_without_a_key_are_poisoned_and_page_0_is_zero() -> None:
    inputs = make_inputs(replace(BASE, decode=(20,)), CPU)
    assert not inputs.kv[0].any()
    assert int(inputs.kv[1:].isnan()[:, 0, 0, :, 0].sum()) == 16 * (inputs.kv.shape[0] - 1) - 20


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({"decode": (40, 40, 40)}, None),
        ({}, Chunk(40, 40)),
        ({}, Chunk(7, 40)),
        ({"decode": (40, 40)}, Chunk(16, 16)),
    ],
    ids=["decode", "prefill", "extend", "both"],
)
def test_torch_attends_to_the_same(changes: dict[str, object], chunk: Chunk | None) -> None:
    """On a CPU torch has its flash backend alone; the others must say so, and are not timed."""
    case = replace(BASE, prefill=() if chunk is None else (chunk, chunk), **changes)  # type: ignore[arg-type]
    inputs = make_inputs(case, CPU)
    rivals, _ = make_rivals([inputs])
    calls = {rival.name: rival.calls[0] for rival in rivals}
    for name in ("sdpa flash", "gather + sdpa flash"):
        found = calls[name]()
        assert isinstance(found, list)
        assert worst_error(found, exact_outputs(inputs)) < 1e-5
    with pytest.raises(RuntimeError):
        calls["sdpa cudnn"]()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(BASE, decode=(3, 4)), "unequal lengths"),
        (replace(BASE, decode=(3,), window=2), "no such attention"),
        (replace(BASE, decode=(3,), kv_dtype="float8_e4m3fn"), "no such attention"),
    ],
)
def test_who_cannot_take_part_says_why(case: AttentionCase, reason: str) -> None:
    rivals, failures = make_rivals([make_inputs(case, CPU)])
    assert rivals == []
    assert all(reason in failure.reason for failure in failures.values())
    assert {"sdpa flash", "gather + sdpa flash"} <= set(failures)


def test_keys_that_would_not_fit_are_not_gathered() -> None:
    inputs = make_inputs(replace(BASE, decode=(4,)), CPU)
    large = replace(BASE, decode=(2**26,) * 2)
    assert dense_bytes(large) > DENSE_BYTES
    assert "GB" in why_not(replace(inputs, case=large))


def test_a_case_is_checked_and_timed(dry: Device) -> None:
    case = replace(BASE, name="a case", dtype="bfloat16", decode=(70,) * 3, shared=(SharedRows(0, 3, 64),))
    assert check_case(case, dry).problem == ""
    row, check = time_case(case, "shared", dry, rounds=1)
    assert (row.name, check.problem) == ("a case", "")
    assert row.us > 0
    assert row.error is not None
    assert row.error < 1e-3
    assert {rival.name for rival in row.rivals if rival.us} == {UNGROUPED, "sdpa flash", "gather + sdpa flash"}
    assert row.kv_bytes == (64 + 3 * 5) * 2 * 2 * 64 * 2
