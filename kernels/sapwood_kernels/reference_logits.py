"""What is done to logits, as plain formulas: the oracle of `logits_prepare` and `sample`, with a sort and in fp64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.logit_edits import NOT_SEEN, LogitEdits
from sapwood_kernels.sample import NOT_FINITE, NOTHING_LEFT, SamplingTensors

_WORD = np.uint64(2**32 - 1)


def logits_prepare(
    logits: Tensor,
    num_tokens: int,
    edits: LogitEdits | None = None,
    bitmask: Tensor | None = None,
    bitmask_rows: Tensor | None = None,
) -> None:
    """See `logits_prepare.logits_prepare`."""
    for row in range(logits.shape[0]):
        if edits is not None:
            _edit(logits[row], edits, row)
        if bitmask is not None and bitmask_rows is not None and bitmask_rows[row] >= 0:
            words = bitmask[int(bitmask_rows[row])].tolist()
            for token in range(num_tokens):
                if not words[token // 32] >> token % 32 & 1:
                    logits[row, token] = -torch.inf
    logits[:, num_tokens:] = -torch.inf


def sample(logits: Tensor, settings: SamplingTensors) -> Tensor:
    """See `sample.sample`."""
    rows = range(logits.shape[0])
    return torch.tensor([_draw(logits[row], settings, row) for row in rows], dtype=torch.int64, device=logits.device)


def probabilities(logits: Tensor, settings: SamplingTensors, row: int) -> npt.NDArray[np.float64]:
    """[V]: each token's probability to be drawn, 0 for those that filters drop. temperature over 0, logits finite or
    minus infinity, not all of them."""
    x = logits.double().numpy()
    weights: npt.NDArray[np.float64] = np.exp((x - x.max()) / max(float(settings.temperature[row]), 1e-30))
    ranking = np.argsort(-x, kind="stable")
    ranked = weights[ranking]
    top_k, top_p = int(settings.top_k[row]), float(settings.top_p[row])
    kept = np.ones(len(x), dtype=bool)
    if top_k > 0:
        kept[top_k:] = False
    mass = np.where(kept, ranked, 0.0)
    if top_p < 1:
        kept &= np.cumsum(mass) - mass < top_p * mass.sum()
    kept &= ranked >= float(settings.min_p[row])
    kept[0] = True
    weights[ranking[~kept]] = 0.0
    weights /= weights.sum()
    return weights


def exponentials(seed: int, choice: int, position: int, size: int) -> npt.NDArray[np.float64]:
    """[size]: each token's exponentially distributed number, `-log(1 - u)` of a Philox number u. seed is unsigned."""
    counter = np.zeros((4, -(-size // 4)), dtype=np.uint64)
    counter[0] = np.arange(counter.shape[1])
    counter[1], counter[2] = position, choice
    numbers = philox(counter, (seed % 2**32, seed >> 32)).T.reshape(-1)[:size]
    uniform = np.minimum((numbers.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    times: npt.NDArray[np.float64] = -np.log1p(-uniform)
    return times


def philox(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011). counter [4, n] -> [4, n], all numbers under 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0)
        c2 = (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = second & _WORD, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3])


def _edit(row: Tensor, edits: LogitEdits, index: int) -> None:
    repetition, presence, frequency = edits.penalties[index].tolist()
    for edit in range(int(edits.first[index]), int(edits.first[index + 1])):
        token, count, bias = int(edits.ids[edit]), int(edits.counts[edit]), edits.bias[edit]
        if bias == -torch.inf:
            row[token] = -torch.inf
            continue
        row[token] += bias
        if count != NOT_SEEN:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        if count > 0:
            row[token] -= presence
            row[token] -= frequency * torch.tensor(count, dtype=torch.float32)


def _draw(logits: Tensor, settings: SamplingTensors, row: int) -> int:
    x = logits.numpy()
    if np.isnan(x).any() or x.max() == np.inf:
        return NOT_FINITE
    if x.max() == -np.inf:
        return NOTHING_LEFT
    if settings.temperature[row] == 0:
        return int(x.argmax())
    chances = probabilities(logits, settings, row)
    times = exponentials(
        int(settings.seed[row]) % 2**64, int(settings.choice[row]), int(settings.position[row]), len(chances)
    )
    with np.errstate(divide="ignore"):
        return int(np.where(chances > 0, np.log(chances) - np.log(times), -np.inf).argmax())
