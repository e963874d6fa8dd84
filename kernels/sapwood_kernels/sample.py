"""The next token of each row of logits, without sorting.

One program computes one row, in tiles of one size and in one order, so a row's token depends on its logits, its
settings and `(seed, choice, position)` alone. A token is drawn by a race: the smallest of exponentially distributed
times, each divided by its token's probability (the Gumbel-max trick in another form). The times come from Philox
(Salmon et al., 2011), so a token's time depends on its id and the key alone, not on how many others are kept.

Filters need many passes over what they choose from. So first those logits are collected that are not far from the
largest; if they are few and all that could be kept is among them, which is the rule, the passes are over them alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from sapwood_kernels.attention_check import check_device, check_last_strides
from sapwood_kernels.check import check_dtype, check_shape
from sapwood_kernels.token_filters import filter_threshold, order_key, weight_of

NOT_FINITE = -1
"""In place of a token: the row has a NaN, or its largest logit is infinity."""
NOTHING_LEFT = -2
"""In place of a token: all logits are minus infinity."""

_BLOCK = 4096
_MAX_CANDIDATES = 8192
_CANDIDATE_BLOCK = 1024
_REACH = 11.0
"""Candidates have at least exp(-11) of the largest probability. This and the sizes above are guesses, to be measured on
a GPU. None of them changes what is kept, up to the rounding of sums."""


@dataclass(frozen=True, kw_only=True)
class SamplingTensors:
    """Settings of R rows, each tensor [R]; see `SamplingParams` for what they mean to a client."""

    temperature: Tensor
    """fp32; 0 is greedy."""
    top_k: Tensor
    """int32; 0 is off."""
    top_p: Tensor
    """fp32; 1 is off."""
    min_p: Tensor
    """fp32; 0 is off."""
    seed: Tensor
    """int64: the bits of an unsigned number."""
    choice: Tensor
    """int32."""
    position: Tensor
    """int32, of the token to be drawn among the choice's output."""


_DTYPES = {"top_k": torch.int32, "seed": torch.int64, "choice": torch.int32, "position": torch.int32}


def sample(logits: Tensor, settings: SamplingTensors) -> Tensor:
    """A token id per row, int64 [R], or NOT_FINITE or NOTHING_LEFT.

    logits fp32 [R, V] of any row stride, as `logits_prepare` left them. At temperature 0 the largest logit wins, the
    smallest id on a tie. Else, of the ranking by logits, the smaller id first among equals, `top_k` keeps that many;
    `top_p` of those, renormalised, the shortest prefix whose mass reaches it; `min_p` what has at least that share of
    the largest probability. At least one token is kept, and one is drawn in proportion to `exp(logit / temperature)`.

    Raises ValueError for what can't be, before anything is launched; values are looked at if they lie on the CPU.
    """
    _check(logits, settings)
    num_rows, size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    candidates = torch.empty(num_rows, _MAX_CANDIDATES, dtype=torch.float32, device=logits.device)
    _sample[(num_rows,)](
        logits,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.seed,
        settings.choice,
        settings.position,
        candidates,
        token_ids,
        logits.stride(0),
        size,
        NOT_FINITE=NOT_FINITE,
        NOTHING_LEFT=NOTHING_LEFT,
        BLOCK=_BLOCK,
        MAX_CANDIDATES=_MAX_CANDIDATES,
        CANDIDATE_BLOCK=_CANDIDATE_BLOCK,
        REACH=_REACH,
        num_warps=16,
        enable_fp_fusion=False,
    )
    return token_ids


def _check(logits: Tensor, settings: SamplingTensors) -> None:
    check_shape("logits", logits, (None, None))
    check_dtype("logits", logits, (torch.float32,))
    if logits.shape[1] == 0:
        raise ValueError(f"logits has shape {list(logits.shape)}; accepted: at least one column")
    tensors = {field.name: getattr(settings, field.name) for field in fields(settings)}
    for name, tensor in tensors.items():
        check_shape(name, tensor, (logits.shape[0],))
        check_dtype(name, tensor, (_DTYPES.get(name, torch.float32),))
    check_last_strides({"logits": logits} | tensors)
    check_device(tensors, logits.device)
    if logits.device.type == "cpu":
        for name, least, largest in (("temperature", 0, None), ("top_k", 0, None), ("top_p", 0, 1), ("min_p", 0, 1)):
            values = tensors[name]
            # Written so that a NaN is refused too.
            fits = (values >= least) & (values <= (float("inf") if largest is None else largest))
            if not fits.all():
                accepted = f"{least} or more" if largest is None else f"{least} to {largest}"
                raise ValueError(f"{name} holds {values[~fits][0].item()}; accepted: {accepted}")


@triton.jit
def _sample(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    choice: tl.tensor,
    position: tl.tensor,
    candidates: tl.tensor,
    token_ids: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    NOT_FINITE: tl.constexpr,
    NOTHING_LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    CANDIDATE_BLOCK: tl.constexpr,
    REACH: tl.constexpr,
) -> None:
    """See `sample`. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * stride
    peak, best, has_nan = _largest(values, size, BLOCK)
    if has_nan | (peak == float("inf")):
        tl.store(token_ids + row, NOT_FINITE)
        return
    if peak == float("-inf"):
        tl.store(token_ids + row, NOTHING_LEFT)
        return
    heat = tl.load(temperature + row)
    if heat == 0:
        tl.store(token_ids + row, best)
        return
    # So small a temperature leaves the largest logits alone, and its inverse is finite.
    heat = tl.maximum(heat, 1e-30)
    scale = 1.4426950408889634 / heat
    row_top_k = tl.load(top_k + row)
    row_top_p = tl.load(top_p + row)
    threshold = order_key(tl.full([], float("-inf"), tl.float32))
    num_ties = tl.full([], 0, tl.int32)
    if (row_top_k > 0) | (row_top_p < 1):
        near = candidates + row * MAX_CANDIDATES
        cut = peak - REACH * heat
        num_finite, total, num_near, near_total = _collect(values, size, near, cut, peak, scale, BLOCK, MAX_CANDIDATES)
        keep = tl.where(row_top_k > 0, tl.minimum(row_top_k, num_finite), num_finite)
        enough = tl.where(keep < num_finite, num_near >= keep, near_total >= row_top_p * total)
        if (num_near <= MAX_CANDIDATES) & (enough | (num_near == num_finite)):
            tl.debug_barrier()  # what was collected is seen by all threads
            threshold, num_ties = filter_threshold(
                near, num_near, cut, keep, num_finite, total, row_top_p, peak, scale, CANDIDATE_BLOCK
            )
        else:
            threshold, num_ties = filter_threshold(
                values, size, float("-inf"), keep, num_finite, total, row_top_p, peak, scale, BLOCK
            )
    winner = _race(
        values, size, threshold, num_ties, tl.load(min_p + row), peak, scale,
        tl.load(seed + row), tl.load(choice + row), tl.load(position + row), BLOCK,
    )  # fmt: skip
    tl.store(token_ids + row, winner)


@triton.jit
def _largest(values: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, ...]:
    """The row's largest value, the smallest id that has it, and whether there is a NaN."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(values + token, mask=token < size, other=float("-inf"))
        nans += (x != x).to(tl.int32)
        at = tl.where(x > largest, token, at)
        largest = tl.where(x > largest, x, largest)
    peak = tl.max(largest)
    best = tl.min(tl.where(largest == peak, at, size))
    return peak, best, tl.sum(nans) > 0


@triton.jit
def _collect(
    values: tl.tensor,
    size: tl.tensor,
    near: tl.tensor,
    cut: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """How many values are finite, their weights' sum; how many are at least `cut`, their weights' sum. The first
    MAX_CANDIDATES of those are written to `near`, in order."""
    num_finite = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    near_total = tl.zeros([BLOCK], tl.float32)
    num_near = tl.full([], 0, tl.int32)
    for start in tl.range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(values + token, mask=token < size, other=float("-inf"))
        is_finite = x > float("-inf")
        is_near = is_finite & (x >= cut)
        weight = weight_of(x, peak, scale)
        num_finite += is_finite.to(tl.int32)
        total += weight
        near_total += tl.where(is_near, weight, 0.0)
        found = tl.sum(is_near.to(tl.int32))
        if found > 0:
            index = num_near + tl.cumsum(is_near.to(tl.int32), 0) - 1
            tl.store(near + index, x, mask=is_near & (index < MAX_CANDIDATES))
            num_near += found
    return tl.sum(num_finite), tl.sum(total), num_near, tl.sum(near_total)


@triton.jit
def _race(
    values: tl.tensor,
    size: tl.tensor,
    threshold: tl.tensor,
    num_ties: tl.tensor,
    min_p: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    seed: tl.tensor,
    choice: tl.tensor,
    position: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The kept token that comes in first; on a tie, which fp32 may give, the smallest id."""
    earliest = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    ties_before = tl.full([], 0, tl.int32)
    for start in tl.range(0, size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(values + token, mask=token < size, other=float("-inf"))
        key = order_key(x)
        kept = key > threshold
        is_tie = ((key == threshold) & (token < size)).to(tl.int32)
        ties = tl.sum(is_tie)
        if (ties > 0) & (ties_before < num_ties):
            rank = ties_before + tl.cumsum(is_tie, 0) - 1
            kept = kept | ((is_tie > 0) & (rank < num_ties))
        ties_before += ties
        kept = kept & (weight_of(x, peak, scale) >= min_p)
        if tl.sum(kept.to(tl.int32)) > 0:
            # Larger is earlier: the logarithm of probability over time.
            score = (x - peak) * scale - tl.log2(_exponentials(start, seed, choice, position, BLOCK))
            is_earlier = kept & (score > earliest)
            at = tl.where(is_earlier, token, at)
            earliest = tl.where(is_earlier, score, earliest)
    return tl.min(tl.where(earliest == tl.max(earliest), at, size))


@triton.jit
def _exponentials(
    start: tl.tensor, seed: tl.tensor, choice: tl.tensor, position: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Exponentially distributed numbers of the tokens `[start, start + BLOCK)`: over 0, finite, precise if small.

    Philox4x32-10, its key the seed, its counter (id // 4, position, choice, 0); token `id` takes number id % 4.
    """
    counter = start // 4 + tl.arange(0, BLOCK // 4)
    zero = counter * 0
    r0, r1, r2, r3 = tl.philox(seed, counter, zero + position, zero + choice, zero)
    bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    # In (0, 1): 2^-32 is the grid, and the largest is the last fp32 before 1.
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log(1 - u). For small u, of which the winner's is one, 1 - u would lose its lower bits: Taylor's series.
    series = uniform * (1 + uniform * (0.5 + uniform * (0.33333333 + uniform * 0.25)))
    return tl.where(uniform < 0.015625, series, -tl.log(1 - uniform))
