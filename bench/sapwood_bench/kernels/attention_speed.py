"""One case: first right, then timed beside its rivals."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sapwood_bench.kernels.accounting import attention_cost, partial_bytes
from sapwood_bench.kernels.attention import Outputs, PlannedAttention, PlanOptions, plan_attention
from sapwood_bench.kernels.cases import AttentionCase, tiny
from sapwood_bench.kernels.device import Device
from sapwood_bench.kernels.inputs import AttentionInputs, make_inputs
from sapwood_bench.kernels.oracle import exact_attention, relative_error
from sapwood_bench.kernels.results import Check, Failure, Row, as_rivals
from sapwood_bench.kernels.rivals import make_rivals
from sapwood_bench.kernels.targets import UNGROUPED
from sapwood_bench.kernels.timing import ROUNDS, Contender, Prepare, Sampler, rotations, time_contenders

MAX_ERROR = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-5}
"""Relative to fp64 in the Euclidean norm. The inputs are exact, e4m3 keys too; what is rounded are weights, to the
dtype of queries, and the output: by 2 ** -9 at most in bf16, 2 ** -12 in fp16."""
OURS = "sapwood"
SHARED = "shared"


def check_case(case: AttentionCase, device: Device) -> Check:
    """Ours against fp64, for every row."""
    case = tiny(case) if device.dry else case
    inputs = make_inputs(case, device.torch_device)
    return _check(case, case.name, worst_error(_found(plan_attention(inputs).run()), exact_outputs(inputs)))


def time_case(case: AttentionCase, table: str, device: Device, rounds: int = ROUNDS) -> tuple[Row, Check]:
    """The case's row of a table, with the check that came first. RuntimeError if ours can't run."""
    case = tiny(case) if device.dry else case
    cost = attention_cost(case)
    copies = 1 if device.dry else rotations(cost.num_bytes, device.l2_bytes)
    inputs = [make_inputs(case, device.torch_device, seed=seed, placement=seed) for seed in range(copies)]
    exact = exact_outputs(inputs[0])
    plans = [plan_attention(each) for each in inputs]
    error = worst_error(_found(plans[0].run()), exact)
    contenders = [Contender(OURS, [plan.run for plan in plans])]
    if table == SHARED:
        alone = [plan_attention(each, PlanOptions(group=False)) for each in inputs]
        contenders.append(Contender(UNGROUPED, [plan.run for plan in alone]))
    rivals, failures = make_rivals(inputs)
    prepare = _only_if_right(device.prepare, exact, MAX_ERROR[case.dtype])
    times = time_contenders([*contenders, *rivals], prepare, rounds) | failures
    ours = times[OURS]
    if isinstance(ours, Failure):
        raise RuntimeError(f"{case.name}: {ours.reason}")
    row = Row(
        table=table,
        name=case.name,
        us=ours,
        num_bytes=cost.num_bytes,
        flops=cost.flops,
        kv_bytes=cost.kv_bytes,
        partial_bytes=_partial_bytes(plans[0]),
        error=error,
        rivals=as_rivals({name: time for name, time in times.items() if name != OURS}),
    )
    return row, _check(case, f"{case.name}, before it is timed", error)


def exact_outputs(inputs: AttentionInputs) -> list[Tensor]:
    """fp64, decode rows and then prefill, as far as there are any."""
    parts = [part for part in (inputs.decode, inputs.prefill) if part is not None]
    return [exact_attention(inputs, part) for part in parts]


def worst_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative to fp64, of the worse phase."""
    return max(relative_error(ours, wanted) for ours, wanted in zip(found, exact, strict=True))


def _found(outputs: Outputs) -> list[Tensor]:
    return [tensor for tensor in (outputs.decode, outputs.prefill) if tensor is not None]


def _check(case: AttentionCase, name: str, error: float) -> Check:
    limit = MAX_ERROR[case.dtype]
    problem = "" if error <= limit else f"differs from fp64 by {error:.2e} of its norm; accepted: {limit:.0e}"
    return Check(name=name, problem=problem)


def _only_if_right(prepare: Prepare, exact: Sequence[Tensor], limit: float) -> Prepare:
    """A contender that gives other numbers isn't timed: it computes something else."""

    def checked(contender: Contender) -> Sampler:
        found = contender.calls[0]()
        if isinstance(found, Outputs):
            found = _found(found)
        if not isinstance(found, list):
            raise TypeError(f"gave {type(found).__name__}")
        error = worst_error(found, exact)
        if error > limit:
            raise ValueError(f"differs from fp64 by {error:.2e} of its norm")
        return prepare(contender)

    return checked


def _partial_bytes(plan: PlannedAttention) -> int:
    if plan.decode_work is None:
        return 0
    return partial_bytes(plan.inputs.case, plan.decode_work.layout.config.split_size)
