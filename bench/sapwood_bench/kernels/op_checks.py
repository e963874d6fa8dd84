"""The ops around attention on this device: right, and a row's bits its own, whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from sapwood_bench.kernels.logit_ops import on_cpu, random_logits, sampling_tensors
from sapwood_bench.kernels.oracle import relative_error
from sapwood_bench.kernels.results import Check
from sapwood_bench.kernels.trials import LLAMA_8B_SIZES, TINY_SIZES, OpSizes
from sapwood_kernels import reference, reference_logits
from sapwood_kernels.add_rms_norm import add_rms_norm, rms_norm
from sapwood_kernels.logit_edits import EditLists, LogitEdits, RowEdits, build_logit_edits, place_logit_edits
from sapwood_kernels.logits_prepare import logits_prepare
from sapwood_kernels.rope_kv_store import rope_kv_store
from sapwood_kernels.sample import NOT_FINITE, NOTHING_LEFT, SamplingTensors, sample
from sapwood_kernels.silu_mul import silu_mul
from sapwood_kernels.values import HeadNorms, KVScales

_EPS = 1e-6
_E4M3_ERROR = 1e-2
"""Of stored keys, in the norm: where two formulas round a number differently they are a 16th of it apart."""


@dataclass(frozen=True)
class Setting:
    """Where and on what an op is checked."""

    device: torch.device
    sizes: OpSizes
    dtype: torch.dtype
    num_rows: int

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(11)

    def normal(self, *shape: int) -> Tensor:
        """fp32, the same every time."""
        return torch.randn(shape, generator=self.generator(), device=self.device)


def check_op(name: str, device: torch.device, dry: bool) -> Check:
    """One of OP_CHECKS, on a model's sizes, or on tiny ones in the interpreter."""
    setting = Setting(device, LLAMA_8B_SIZES, torch.bfloat16, 17)
    if dry:
        setting = Setting(device, TINY_SIZES, torch.float16, 3)
    return Check(name=name, problem="; ".join(list(OP_CHECKS[name](setting))[:3]))


def stores_e4m3(setting: Setting) -> Iterator[str]:
    """Head norms, rotation, and a store in 8 bits with scales, by the formula."""
    sizes, count = setting.sizes, setting.num_rows
    qkv, cos_sin, slots = _rope_inputs(setting)
    norms = HeadNorms(1.0 + setting.normal(sizes.head_dim) / 8, 1.0 - setting.normal(sizes.head_dim) / 8, _EPS)
    shape = (1 + count, 2, sizes.num_kv_heads, 16, sizes.head_dim)
    ours, wanted = (torch.zeros(shape, device=setting.device).to(torch.float8_e4m3fn) for _ in range(2))
    scales = KVScales(key=0.37, value=2.9)
    q = rope_kv_store(qkv, cos_sin, slots, ours, norms, scales)
    their_q = reference.rope_kv_store(qkv, cos_sin, slots, wanted, norms, scales)
    for what, found, right in (("q", q, their_q), ("kv", ours, wanted)):
        error = relative_error(found.float(), right.double())
        if error > _E4M3_ERROR:
            yield f"{what} differs by {error:.2e} of its norm"
    if ours[0].float().any():
        yield "page 0 was written"


def rows_are_their_own(setting: Setting) -> Iterator[str]:
    """Norms, SwiGLU and rotation: the first row alone has the bits that it has among others."""
    sizes = setting.sizes
    x, gate_up = (
        setting.normal(setting.num_rows, sizes.hidden),
        setting.normal(setting.num_rows, 2 * sizes.intermediate),
    )
    x, gate_up = x.to(setting.dtype), gate_up.to(setting.dtype)
    residual, weight = setting.normal(setting.num_rows, sizes.hidden) * 3, setting.normal(sizes.hidden)
    qkv, cos_sin, slots = _rope_inputs(setting)
    kv = torch.zeros(1 + setting.num_rows, 2, sizes.num_kv_heads, 16, sizes.head_dim, device=setting.device)
    kv = kv.to(setting.dtype)

    def added(rows: slice) -> Tensor:
        return add_rms_norm(x[rows].clone(), residual[rows].clone(), weight, _EPS)

    ops: dict[str, Callable[[slice], Tensor]] = {
        "rms_norm": lambda rows: rms_norm(x[rows], weight, _EPS, setting.dtype),
        "add_rms_norm": added,
        "silu_mul": lambda rows: silu_mul(gate_up[rows]),
        "rope_kv_store": lambda rows: rope_kv_store(qkv[rows], cos_sin[rows], slots[rows], kv, None),
    }
    for name, op in ops.items():
        if not torch.equal(op(slice(0, 1)), op(slice(None))[:1]):
            yield name


def edits_logits(setting: Setting) -> Iterator[str]:
    """Bias, three penalties, bans and a vocabulary's tail, bit by bit as the formula has them."""
    logits = random_logits(4, setting.sizes, setting.generator())
    rows = [
        RowEdits(bias=((5, 2.5), (7, -100.0)), banned_ids=(9, 11)),
        RowEdits(
            token_ids=np.array([3, 5, 250], np.int32),
            token_counts=np.array([0, 1, 7], np.int32),
            repetition_penalty=1.3,
            presence_penalty=0.7,
            frequency_penalty=0.1,
        ),
        RowEdits(),
        RowEdits(banned_ids=(0,)),
    ]
    lists: EditLists = build_logit_edits(rows, setting.sizes.num_tokens)
    wanted = logits.cpu()
    edits: LogitEdits = place_logit_edits(lists, setting.device)
    logits_prepare(logits, setting.sizes.num_tokens, edits)
    reference_logits.logits_prepare(wanted, setting.sizes.num_tokens, place_logit_edits(lists, wanted.device))
    if not torch.equal(logits.cpu(), wanted):
        yield f"{int((logits.cpu() != wanted).sum())} logits differ"


def draws_by_the_rules(setting: Setting) -> Iterator[str]:
    """Greedy is the largest logit, the lowest id on ties; so is top_k 1; NaN and nothing left have ids of their own."""
    logits = random_logits(setting.num_rows, setting.sizes, setting.generator()).round()
    settings = sampling_tensors(setting.num_rows, setting.device)
    greedy = replace(settings, temperature=torch.zeros_like(settings.temperature))
    # Of equal logits numpy takes the first, torch on a GPU any.
    largest = torch.from_numpy(logits.cpu().numpy().argmax(axis=1))
    if not torch.equal(sample(logits, greedy).cpu(), largest):
        yield "greedy isn't the first of the largest logits"
    if not torch.equal(sample(logits, replace(settings, top_k=torch.ones_like(settings.top_k))).cpu(), largest):
        yield "top_k 1 isn't greedy"
    logits[0, 3] = float("nan")
    logits[1] = float("-inf")
    found = sample(logits, settings)[:2].tolist()
    if found != [NOT_FINITE, NOTHING_LEFT]:
        yield f"NaN and nothing left give {found}"


def draws_as_the_formula(setting: Setting) -> Iterator[str]:
    """The very tokens of the formula in fp64, alone or among others, and again. One row may differ: where two tokens'
    times are nearly equal, rounding decides."""
    num_rows = 4 * setting.num_rows if setting.device.type == "cuda" else 2
    logits = random_logits(num_rows, setting.sizes, setting.generator())
    settings = sampling_tensors(num_rows, setting.device)
    found = sample(logits, settings)
    wanted = reference_logits.sample(logits.cpu(), on_cpu(settings))
    wrong = int((found.cpu() != wanted).sum())
    if wrong > 1:
        yield f"{wrong} of {num_rows} rows differ from the formula"
    last = SamplingTensors(**{field.name: getattr(settings, field.name)[-1:] for field in fields(settings)})
    if not torch.equal(sample(logits[-1:], last), found[-1:]):
        yield "a row alone gives another token"
    if not torch.equal(sample(logits, settings), found):
        yield "again, it gives other tokens"


OP_CHECKS: dict[str, Callable[[Setting], Iterator[str]]] = {
    "rope_kv_store with head norms into e4m3": stores_e4m3,
    "rows of pointwise ops alone and in a batch": rows_are_their_own,
    "logits_prepare's edits, bitwise": edits_logits,
    "sample: greedy, ties, NaN, nothing left": draws_by_the_rules,
    "sample: by the formula, alone, again": draws_as_the_formula,
}


def _rope_inputs(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """qkv, cosines and sines, slots: each token's in a page of its own."""
    sizes = setting.sizes
    heads = sizes.num_heads + 2 * sizes.num_kv_heads
    qkv = setting.normal(setting.num_rows, heads * sizes.head_dim).to(setting.dtype)
    angles = setting.normal(setting.num_rows, sizes.head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    slots = 16 * (1 + torch.arange(setting.num_rows, device=setting.device)) + 3
    return qkv, cos_sin, slots
