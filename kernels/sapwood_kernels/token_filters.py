"""Top-k and top-p without sorting: which of a row's logits are kept, as one threshold and a number of ties at it.

Logits are compared by keys, int32 in the order of the numbers, and the threshold's key is found by bisection: each pass
over the logits halves the range of keys at least, so there are at most 32. Each bound then moves on to a key that some
logit has, which in practice leaves about 12. Among equal logits the smallest ids come first, so what is kept is exactly
a prefix of the ranking that a stable sort would give.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_key(x: tl.tensor) -> tl.tensor:
    """fp32, no NaN, as int32 of the same order. Both zeros have one key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def weight_of(x: tl.tensor, peak: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """A token's probability over that of the most likely one. scale is log2(e) over the temperature."""
    return tl.exp2((x - peak) * scale)


@triton.jit
def filter_threshold(
    values: tl.tensor,
    num_values: tl.tensor,
    floor: tl.tensor,
    top_k: tl.tensor,
    num_finite: tl.tensor,
    total: tl.tensor,
    top_p: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """`(threshold, num_ties)`, int32: kept are keys over the threshold, and as many of those at it, smallest ids first.

    values: fp32 [num_values], all logits of a row from `floor` up, with `peak`, the largest: all that could be kept.
    top_k: how many to keep, num_finite (how many the row has) for all. total: the weights of the whole row, summed up;
    read if top_k keeps all. top_p: the shortest prefix whose weights reach this share of what top_k kept, at least one
    token; 1 for all.
    """
    threshold = order_key(floor)
    num_ties = num_values
    largest = order_key(peak)
    if top_k < num_finite:
        threshold = _reaching_key(values, num_values, top_k, threshold, largest, peak, scale, True, BLOCK)
        num_ties = top_k - _sum_from(values, num_values, threshold + 1, peak, scale, True, BLOCK).to(tl.int32)
        above = _sum_from(values, num_values, threshold + 1, peak, scale, False, BLOCK)
        total = above + num_ties * weight_of(_value_of(threshold), peak, scale)
    if top_p < 1:
        bound = top_p * total
        found = _reaching_key(values, num_values, bound, threshold, largest, peak, scale, False, BLOCK)
        num_above = _sum_from(values, num_values, found + 1, peak, scale, True, BLOCK)
        if found > threshold:
            num_ties = (_sum_from(values, num_values, found, peak, scale, True, BLOCK) - num_above).to(tl.int32)
        # A tie is kept as long as what lies before it has not reached the bound.
        missing = bound - _sum_from(values, num_values, found + 1, peak, scale, False, BLOCK)
        weight = weight_of(_value_of(found), peak, scale)
        needed = tl.minimum(tl.ceil(missing / tl.where(weight > 0, weight, 1.0)), num_ties.to(tl.float32))
        num_ties = tl.maximum(needed.to(tl.int32), tl.where(num_above > 0, 0, 1))
        threshold = found
    return threshold, num_ties


@triton.jit
def _value_of(key: tl.tensor) -> tl.tensor:
    """The number with this key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _reaching_key(
    values: tl.tensor,
    num_values: tl.tensor,
    goal: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest key from which up the values reach `goal`: counted, or their weights summed up.

    low: a key that is known to reach it; high: that of the largest value.
    """
    while low < high:
        middle = (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        reached = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        below = tl.full([BLOCK], -0x80000000, tl.int32)
        for start in tl.range(0, num_values, BLOCK):
            index = start + tl.arange(0, BLOCK)
            x = tl.load(values + index, mask=index < num_values, other=float("-inf"))
            key = order_key(x)
            is_from = key >= middle
            reached += tl.where(is_from, 1.0 if COUNTED else weight_of(x, peak, scale), 0.0)
            above = tl.minimum(above, tl.where(is_from, key, 0x7FFFFFFF))
            below = tl.maximum(below, tl.where(is_from, -0x80000000, key))
        if tl.sum(reached) >= goal:
            low = tl.min(above)
        else:
            high = tl.maximum(tl.max(below), low)
    return low


@triton.jit
def _sum_from(
    values: tl.tensor,
    num_values: tl.tensor,
    key: tl.tensor,
    peak: tl.tensor,
    scale: tl.tensor,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How many values have this key or a larger one, which fp32 counts exactly up to 2^24, or their weights' sum."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(values + index, mask=index < num_values, other=float("-inf"))
        total += tl.where(order_key(x) >= key, 1.0 if COUNTED else weight_of(x, peak, scale), 0.0)
    return tl.sum(total)
