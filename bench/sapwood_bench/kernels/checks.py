"""The steps that check and time nothing, cut into named parts that may run in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sapwood_bench.kernels.attention_speed import check_case
from sapwood_bench.kernels.cases import AttentionCase, Heads, decode_cases, feature_cases, prefill_cases
from sapwood_bench.kernels.device import Device
from sapwood_bench.kernels.identity import FULL, TINY, check_identity, identity_cases, repeats
from sapwood_bench.kernels.op_checks import OP_CHECKS, check_op
from sapwood_bench.kernels.results import Check
from sapwood_kernels.config_table import ConfigRow, attention_config, config_rows, device_arch


@dataclass(frozen=True)
class CheckStep:
    """One such step."""

    names: Callable[[bool], list[str]]
    """Of its parts; the argument says whether it is a dry run."""
    check: Callable[[str, Device], list[Check]]
    """Carries out one part."""


def _correct_cases(dry: bool) -> dict[str, AttentionCase]:
    """Every feature, and every shape that is timed: so their kernels are compiled when the clock runs."""
    chosen = feature_cases() if dry else (*feature_cases(), *decode_cases(), *prefill_cases())
    return {case.name: case for case in (chosen[:1] if dry else chosen)}


def _correct(name: str, device: Device) -> list[Check]:
    return [check_case(_correct_cases(device.dry)[name], device)]


def _identity_cases(dry: bool) -> dict[str, AttentionCase]:
    return {case.name: case for case in identity_cases(dry)}


def _identity(name: str, device: Device) -> list[Check]:
    case = _identity_cases(device.dry)[name]
    return check_identity(case, device.torch_device, TINY if device.dry else FULL)


def _repeat_cases(dry: bool) -> dict[str, AttentionCase]:
    """A case for each row of the table that holds for this device, at its largest head dim and group. ValueError for
    a device that has none."""
    arch = device_arch(torch.device("cpu" if dry else "cuda"))
    found = {}
    for row in config_rows():
        # By lookup, since a device may run another one's rows.
        if attention_config(replace(row.answers()[-1], arch=arch)) is row.config:
            case = _case_of_row(row, dry)
            found[case.name] = case
    return dict(list(found.items())[:1]) if dry else found


def _case_of_row(row: ConfigRow, dry: bool) -> AttentionCase:
    dtype = str(torch.float16 if dry else row.dtypes[0]).removeprefix("torch.")
    head_dim, group = (64, 2) if dry else (row.head_dims[-1], row.groups[-1])
    name = f"{row.phase.value}, head dim {head_dim}, group {group}, {dtype}"
    return AttentionCase(name=name, heads=Heads(name, 2 * group, 2, head_dim), dtype=dtype)


def _repeat(name: str, device: Device) -> list[Check]:
    scale = TINY if device.dry else FULL
    problems = list(repeats(_repeat_cases(device.dry)[name], device.torch_device, scale))
    return [Check(name=f"{scale.repeats} runs of one launch: {name}", problem="; ".join(problems[:3]))]


def _op(name: str, device: Device) -> list[Check]:
    return [check_op(name, device.torch_device, device.dry)]


CHECKS = {
    "correct": CheckStep(lambda dry: list(_correct_cases(dry)), _correct),
    "identity": CheckStep(lambda dry: list(_identity_cases(dry)), _identity),
    "repeat": CheckStep(lambda dry: list(_repeat_cases(dry)), _repeat),
    "ops": CheckStep(lambda dry: list(OP_CHECKS), _op),
}
