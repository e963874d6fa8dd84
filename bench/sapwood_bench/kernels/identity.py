"""The same bits, however a row is computed: what a cached prefix, a batch and a group of sharers rest on.

Every check compares outputs bit by bit on the device it runs on. In Triton's interpreter they are necessary, never
proof: it knows no warps, no contraction and no matrix instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sapwood_bench.kernels.attention import PlanOptions, plan_attention
from sapwood_bench.kernels.cases import (
    HEADS_OF_64,
    HEADS_OF_256,
    LLAMA_8B,
    QWEN_30B,
    AttentionCase,
    Chunk,
    Heads,
    SharedRows,
)
from sapwood_bench.kernels.inputs import AttentionInputs, PhaseTensors, make_inputs, phase_tensors
from sapwood_bench.kernels.results import Check

PROMPT = 96
"""Tokens of a prompt that is split everywhere."""
LONG_PROMPT = 1500
"""Of one that is cut into chunks at random: several tiles, whatever their size."""
REPEATS = 50
_GROUP_OF_3 = Heads("group of 3", 6, 2, 128)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much to run: all of it on a GPU, little in the interpreter, where a launch takes a tenth of a second."""

    splits: Sequence[int]
    """Of the prompt of PROMPT tokens."""
    long_prompt: int
    mates: int
    """Sequences beside the one that is looked at."""
    shared: int
    """Keys of a shared prefix."""
    repeats: int


FULL = Scale(splits=range(1, PROMPT), long_prompt=LONG_PROMPT, mates=16, shared=2048, repeats=REPEATS)
TINY = Scale(splits=(1, 64, 95), long_prompt=70, mates=2, shared=128, repeats=2)


def identity_cases(dry: bool) -> tuple[AttentionCase, ...]:
    """Heads and dtypes to check with; each is a batch still without rows."""
    if dry:
        return (AttentionCase(name="float16", heads=Heads("tiny", 2, 1, 64), dtype="float16"),)
    base = AttentionCase(name="bfloat16")
    return (
        *(replace(base, name=f"bfloat16, {heads.model}", heads=heads) for heads in (LLAMA_8B, QWEN_30B, _GROUP_OF_3)),
        *(replace(base, name=f"bfloat16, {heads.model}", heads=heads) for heads in (HEADS_OF_64, HEADS_OF_256)),
        replace(base, name="float16", dtype="float16"),
        replace(base, name="bfloat16 on e4m3", kv_dtype="float8_e4m3fn"),
        replace(base, name="bfloat16, window 100, sinks", window=100, sinks=True),
        replace(base, name="bfloat16, softcap 30, pages of 64", softcap=30.0, page_size=64),
    )


Report = Callable[[AttentionCase, torch.device, Scale], Iterator[str]]


def check_identity(case: AttentionCase, device: torch.device, scale: Scale) -> list[Check]:
    """Every rule, on one kind of heads."""
    return [
        Check(name=f"{name}: {case.name}", problem="; ".join(list(rule(case, device, scale))[:3]))
        for name, rule in RULES.items()
    ]


def splits_of_a_prompt(case: AttentionCase, device: torch.device, scale: Scale) -> Iterator[str]:
    """Computed after a cached part of any length, the rest of a prompt has the bits of a whole one; so has the part."""
    inputs, whole = _whole_prompt(case, PROMPT, device)
    for split in scale.splits:
        yield from _differs(f"first {split}", _chunk(inputs, 0, split), whole[:split])
        yield from _differs(f"from {split} on", _chunk(inputs, split, PROMPT), whole[split:])


def chunks_of_a_long_prompt(case: AttentionCase, device: torch.device, scale: Scale) -> Iterator[str]:
    """Cut anywhere, into chunks of any size."""
    length = scale.long_prompt
    inputs, whole = _whole_prompt(case, length, device)
    cuts = np.sort(np.random.default_rng(1).choice(np.arange(1, length), size=6, replace=False)).tolist()
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        yield from _differs(f"chunk {start} to {stop}", _chunk(inputs, start, stop), whole[start:stop])


def batch_of_one(case: AttentionCase, device: torch.device, scale: Scale) -> Iterator[str]:
    """Alone or among others, in either phase; rows of padding beside them change nothing either."""
    lengths = [PROMPT, *(37 * (1 + mate % 7) for mate in range(scale.mates))]
    batch = replace(case, decode=(*lengths, 0), prefill=tuple(Chunk(min(length, 40), length) for length in lengths))
    inputs = make_inputs(batch, device)
    together = plan_attention(inputs).run()
    if inputs.decode is None or inputs.prefill is None:
        raise RuntimeError("a case without rows")
    alone = plan_attention(replace(inputs, decode=inputs.decode.row(0), prefill=inputs.prefill.row(0))).run()
    yield from _differs("decode", alone.decode, _first(together.decode, 1))
    yield from _differs("its lse", alone.lse, _first(together.lse, 1))
    yield from _differs("prefill", alone.prefill, _first(together.prefill, 40))
    if together.decode is not None and together.decode[-1].any():
        yield "a row without keys isn't zero"


def placements(case: AttentionCase, device: torch.device, scale: Scale) -> Iterator[str]:
    """Wherever pages lie in the pool."""
    batch = replace(case, decode=(PROMPT, 300), prefill=(Chunk(40, 130),))
    here, there = (plan_attention(make_inputs(batch, device, placement=place)).run() for place in (0, 1))
    yield from _differs("decode", here.decode, there.decode)
    yield from _differs("prefill", here.prefill, there.prefill)


def grouped_decode(case: AttentionCase, device: torch.device, scale: Scale) -> Iterator[str]:
    """Rows that share pages: in groups or each alone, in wide items or narrow ones. One group within another's rows,
    two rows that end inside the prefix or with it, and rows that share nothing."""
    outer, inner, mates = scale.shared, scale.shared // 2, scale.mates
    decode = tuple(outer + 5 + 3 * mate for mate in range(mates)) + (inner + 9,) * mates + (inner - 3, inner, 77, 0)
    shared = (SharedRows(0, 2 * mates + 2, inner), SharedRows(0, mates, outer))
    inputs = make_inputs(replace(case, decode=decode, shared=shared), device)
    grouped = plan_attention(inputs).run()
    for name, options in (
        ("ungrouped", PlanOptions(group=False)),
        ("grouped, no wide items", PlanOptions(wide=False)),
        ("ungrouped, no wide items", PlanOptions(group=False, wide=False)),
    ):
        other = plan_attention(inputs, options).run()
        yield from _differs(name, other.decode, grouped.decode)
        yield from _differs(f"{name}, lse", other.lse, grouped.lse)


def repeats(case: AttentionCase, device: torch.device, scale: Scale) -> Iterator[str]:
    """Run again, it gives the same: a race would show, sooner or later."""
    outer = scale.shared
    batch = replace(
        case,
        decode=(outer + 5,) * scale.mates + (PROMPT, 0, 1),
        prefill=(Chunk(min(outer, 300), outer), Chunk(40, 40)),
        shared=(SharedRows(0, scale.mates, outer),),
    )
    plan = plan_attention(make_inputs(batch, device))
    first = plan.run()
    for number in range(scale.repeats):
        again = plan.run()
        yield from _differs(f"run {number}, decode", again.decode, first.decode)
        yield from _differs(f"run {number}, prefill", again.prefill, first.prefill)


RULES: dict[str, Report] = {
    "a prompt of 96 split at every token": splits_of_a_prompt,
    "a long prompt in chunks": chunks_of_a_long_prompt,
    "a batch of one and a full one": batch_of_one,
    "two placements of pages": placements,
    "grouped, ungrouped, wide and narrow": grouped_decode,
    "the same launch again": repeats,
}


def _whole_prompt(case: AttentionCase, length: int, device: torch.device) -> tuple[AttentionInputs, Tensor]:
    inputs = make_inputs(replace(case, prefill=(Chunk(length, length),)), device)
    whole = plan_attention(inputs).run().prefill
    if whole is None:
        raise RuntimeError("a prompt gave nothing")
    return inputs, whole


def _chunk(inputs: AttentionInputs, start: int, stop: int) -> Tensor | None:
    """The prompt's queries `[start, stop)` computed by themselves, when there are `stop` keys."""
    whole = inputs.prefill
    if whole is None:
        raise RuntimeError("a case without a prompt")
    part: PhaseTensors = phase_tensors(
        whole.q[start:stop], whole.block_table, np.array([stop], np.int32), np.array([stop - start], np.int32)
    )
    return plan_attention(replace(inputs, prefill=part)).run().prefill


def _first(tensor: Tensor | None, count: int) -> Tensor | None:
    return None if tensor is None else tensor[:count]


def _differs(what: str, found: Tensor | None, wanted: Tensor | None) -> Iterator[str]:
    """In words, if any bit differs."""
    if found is None or wanted is None:
        raise RuntimeError(f"{what}: nothing to compare")
    if found.shape != wanted.shape:
        yield f"{what}: shape {list(found.shape)}, not {list(wanted.shape)}"
    elif not torch.equal(_bits(found), _bits(wanted)):
        wrong = int((_bits(found) != _bits(wanted)).sum())
        yield f"{what}: {wrong} of {found.numel()} numbers differ"


def _bits(tensor: Tensor) -> Tensor:
    """As whole numbers, so that NaN equals itself and 0 isn't -0."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
