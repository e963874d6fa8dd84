"""The online softmax, in one place: every kernel that attends, and the merge of splits, updates and folds with these.

Milakov and Gimelshein, 2018. Scores are in units of log 2, so that `exp2`, the device's own instruction, serves. Where
a row has seen no key yet, its maximum is minus infinity; `finite` keeps that from turning into NaN.

Kernels are compiled with `enable_fp_fusion=False`, and a fused multiply-add is written as `tl.fma`: then a row's bits
don't depend on which loop a tile is computed in, since all loops run this very arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def log2_scores(products: tl.tensor, scale: tl.tensor, softcap: tl.constexpr) -> tl.tensor:
    """Scores in units of log 2 from `q k^T`: `products * scale`, capped if `softcap` isn't 0.

    scale fp32 holds log2(e) as a factor, softcap is in natural units: `cap * tanh(score / cap)` (Gemma 2, 2024), with
    `tanh(x) = 1 - 2 / (exp(2 x) + 1)`, which overflows to 1 and -1, not to NaN.
    """
    if softcap == 0:
        scores = products * scale
    else:
        grown = tl.exp2(products * (scale * (2 / softcap)))
        # A kernel sees no plain global, so LOG2_E stands here as a number.
        scores = (1 - 2 / (grown + 1)) * (softcap * 1.4426950408889634)
    return scores


@triton.jit
def online_softmax(
    scores: tl.tensor, maximum: tl.tensor, total: tl.tensor, acc: tl.tensor, scale: tl.tensor = 1.0
) -> tuple[tl.tensor, ...]:
    """One tile's scores taken in: `(weights, maximum, total, acc)`, the last three rescaled to the new maximum.

    scores fp32 [rows, keys], masked ones minus infinity, in units of log 2 once they are multiplied by `scale` > 0,
    which here costs no instruction of its own; maximum, total fp32 [rows]; acc fp32 [rows, head_dim], to which the
    caller adds `weights @ values`. A tile that is masked whole changes no bit.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    base = finite(new_maximum)
    weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
    alpha = tl.exp2(maximum - base)
    total = tl.fma(total, alpha, tl.sum(weights, 1))
    return weights, new_maximum, total, acc * alpha[:, None]


@triton.jit
def fold(
    maximum: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    other_maximum: tl.tensor,
    other_total: tl.tensor,
    other_acc: tl.tensor,
) -> tuple[tl.tensor, ...]:
    """The state of a row over the keys of two ranges, from its states over each: `(maximum, total, acc)`.

    maximum and total fp32 scalars or [rows], acc with head_dim as one more dimension. A left fold in ascending order of
    ranges gives the same bits whoever computed the states.
    """
    new_maximum = tl.maximum(maximum, other_maximum)
    base = finite(new_maximum)
    alpha = tl.exp2(maximum - base)
    beta = tl.exp2(other_maximum - base)
    total = tl.fma(total, alpha, other_total * beta)
    acc = tl.fma(acc, tl.expand_dims(alpha, -1), other_acc * tl.expand_dims(beta, -1))
    return new_maximum, total, acc


@triton.jit
def finite(maximum: tl.tensor) -> tl.tensor:
    """The maximum, or 0 where no key has been seen: minus infinity less itself would be NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
