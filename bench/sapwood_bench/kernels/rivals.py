"""The same attention by torch, on the same keys.

`sdpa BACKEND` reads keys that lie side by side, which nobody who shares pages has: gathering them is not timed, so it
is a bound that no page costs anything. `gather + sdpa` times the gathering too: the plain way to attend to pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sapwood_bench.kernels.accounting import ITEM_BYTES
from sapwood_bench.kernels.cases import AttentionCase
from sapwood_bench.kernels.inputs import AttentionInputs, PhaseTensors
from sapwood_bench.kernels.results import Failure
from sapwood_bench.kernels.timing import Call, Contender

try:
    from torch.nn.attention.varlen import varlen_attn as _found
except ImportError:  # an older torch
    _varlen_attn: Callable[..., object] | None = None
else:
    _varlen_attn = _found  # its signature differs from torch to torch

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

DENSE_BYTES = 20 * 2**30
"""Of gathered keys and values of all inputs of a case."""


@dataclass(frozen=True)
class DensePhase:
    """One phase with keys and values gathered: sequences of equal length, padded in no way."""

    q: Tensor
    """[num_sequences, num_heads, num_queries, head_dim]."""
    key: Tensor
    value: Tensor
    """[num_sequences, num_kv_heads, num_keys, head_dim]."""

    @property
    def mask(self) -> dict[str, object]:
        """What tells SDPA which keys a query sees."""
        num_queries, num_keys = self.q.shape[2], self.key.shape[2]
        if num_queries == 1:
            return {}
        if num_queries == num_keys:
            return {"is_causal": True}
        return {"attn_mask": causal_lower_right(num_queries, num_keys)}


Attend = Callable[[DensePhase], Tensor]


def make_rivals(inputs: Sequence[AttentionInputs]) -> tuple[list[Contender], dict[str, Failure]]:
    """Rivals for one case, whose calls give `[num_queries, num_heads, head_dim]` for each phase that there is; and why
    others can't take part. They have as many of the inputs as fit into DENSE_BYTES with their keys gathered."""
    case = inputs[0].case
    reason = why_not(inputs[0])
    if reason:
        names = [*(f"sdpa {name}" for name in BACKENDS), "gather + sdpa flash", "varlen_attn, paged"]
        return [], {name: Failure(reason) for name in names}
    inputs = inputs[: max(DENSE_BYTES // dense_bytes(case), 1)]
    rivals: list[Contender] = []
    failures: dict[str, Failure] = {}
    dense = [[densify(part, each) for part in _phases(each)] for each in inputs]
    for name, backend in BACKENDS.items():
        attend = sdpa_attend(backend)
        rivals.append(Contender(f"sdpa {name}", [_each(attend, phases) for phases in dense]))
    flash = sdpa_attend(SDPBackend.FLASH_ATTENTION)
    rivals.append(Contender("gather + sdpa flash", [_gathered(flash, each) for each in inputs]))
    if case.flex:
        attend = flex_attend(dense[0][0])
        rivals.append(Contender("flex_attention", [_each(attend, phases) for phases in dense]))
    missing = missing_in_varlen()
    if missing:
        failures["varlen_attn, paged"] = Failure(missing)
    else:
        rivals.append(Contender("varlen_attn, paged", [_varlen_call(each) for each in inputs]))
    return rivals, failures


def why_not(inputs: AttentionInputs) -> str:
    """Why torch can't compute this batch; empty if it can."""
    if not inputs.case.is_plain:
        return "torch has no such attention for these dtypes and rules"
    if dense_bytes(inputs.case) > DENSE_BYTES:
        return f"gathered, the keys of all rows take {dense_bytes(inputs.case) / 1e9:.0f} GB"
    for part in _phases(inputs):
        if len(set(part.num_keys.tolist())) > 1 or len(set(part.num_queries.tolist())) > 1:
            return "sequences of unequal lengths"
    return ""


def dense_bytes(case: AttentionCase) -> int:
    """Of keys and values if every sequence had its own, side by side."""
    num_keys = sum(case.decode) + sum(chunk.num_keys for chunk in case.prefill)
    return 2 * num_keys * case.heads.num_kv_heads * case.heads.head_dim * ITEM_BYTES[case.dtype]


def densify(part: PhaseTensors, inputs: AttentionInputs) -> DensePhase:
    """Queries as SDPA takes them, and a copy of the keys and values that they see."""
    num_sequences, num_keys = len(part.num_keys), int(part.num_keys[0])
    page_size = inputs.case.page_size
    pages = part.batch.block_table[:, : -(-num_keys // page_size)].long()
    tokens = inputs.kv[pages].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :num_keys]
    key, value = (half.contiguous() for half in tokens)
    q = part.q.view(num_sequences, -1, *part.q.shape[1:]).transpose(1, 2)
    return DensePhase(q=q, key=key, value=value)


def sdpa_attend(backend: SDPBackend) -> Attend:
    """SDPA, held to one backend; it raises RuntimeError if that one can't."""

    def attend(phase: DensePhase) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(
                phase.q,
                phase.key,
                phase.value,
                enable_gqa=True,
                **phase.mask,  # type: ignore[arg-type]
            )

    return attend


def flex_attend(like: DensePhase) -> Attend:
    """Compiled flex_attention for phases of this shape."""
    num_queries, num_keys = like.q.shape[2], like.key.shape[2]
    first = num_keys - num_queries

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + first >= key

    mask = None
    if num_queries > 1:
        mask = create_block_mask(sees, None, None, num_queries, num_keys, device=like.q.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(phase: DensePhase) -> Tensor:
        found = compiled(phase.q, phase.key, phase.value, block_mask=mask, enable_gqa=True)
        if not isinstance(found, Tensor):
            raise TypeError(f"flex_attention gave {type(found).__name__}")
        return found

    return attend


def missing_in_varlen() -> str:
    """Why torch's own paged attention can't take part; empty if this torch has it."""
    if _varlen_attn is None:
        return f"torch {torch.__version__} has no varlen_attn"
    parameters = inspect.signature(_varlen_attn).parameters
    missing = [name for name in ("block_table", "seqused_k") if name not in parameters]
    return f"torch {torch.__version__} has no {missing[0]} in varlen_attn" if missing else ""


def _varlen_call(inputs: AttentionInputs) -> Call:
    # [num_pages, page_size, num_kv_heads, head_dim], views of our pages.
    key, value = inputs.kv.transpose(2, 3).unbind(1)
    if _varlen_attn is None:
        raise RuntimeError(missing_in_varlen())
    attend = _varlen_attn

    def call_of(part: PhaseTensors) -> Call:
        longest = int(part.num_keys.max())
        # Of sequences of equal length all columns up to there name pages.
        table = part.batch.block_table[:, : -(-longest // inputs.case.page_size)].contiguous()
        options = {"block_table": table, "seqused_k": part.batch.num_keys, "enable_gqa": True, "window_size": (-1, 0)}
        most = int(part.num_queries.max())
        return lambda: attend(part.q, key, value, part.batch.first_query, None, most, longest, **options)

    calls = [call_of(part) for part in _phases(inputs)]
    return lambda: [call() for call in calls]


def _phases(inputs: AttentionInputs) -> list[PhaseTensors]:
    return [part for part in (inputs.decode, inputs.prefill) if part is not None]


def _each(attend: Attend, phases: Sequence[DensePhase]) -> Call:
    return lambda: [attend(phase).transpose(1, 2).flatten(0, 1) for phase in phases]


def _gathered(attend: Attend, inputs: AttentionInputs) -> Call:
    return lambda: [attend(densify(part, inputs)).transpose(1, 2).flatten(0, 1) for part in _phases(inputs)]
