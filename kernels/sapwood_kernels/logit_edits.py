"""What is changed in single logits, row by row: biases, penalties, bans. Made on the host for `logits_prepare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sapwood_kernels.attention_check import check_device
from sapwood_kernels.check import check_dtype, check_shape

NOT_SEEN = -1
"""In place of a count: the token is in neither prompt nor output."""


def _no_ids() -> npt.NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True)
class RowEdits:
    """One row's. Ids that are padding of the vocabulary are accepted, and without effect."""

    bias: Sequence[tuple[int, float]] = ()
    """Added to logits; values for one id add up."""
    banned_ids: Sequence[int] = ()
    token_ids: npt.NDArray[np.int32] = field(default_factory=_no_ids)
    """[n], distinct: the tokens of prompt and output. Not needed if no penalty is set."""
    token_counts: npt.NDArray[np.int32] = field(default_factory=_no_ids)
    """[n]: how often the output has each; 0 for one of the prompt alone."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def is_penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class EditLists:
    """The edits of R rows, N in all, as compressed sparse rows. An id is at most once in a row."""

    first: npt.NDArray[np.int32]
    """[R + 1]: where each row's edits begin in the lists below, then N."""
    ids: npt.NDArray[np.int32]
    """[N]."""
    counts: npt.NDArray[np.int32]
    """[N]: occurrences in the output, or NOT_SEEN."""
    bias: npt.NDArray[np.float32]
    """[N]: minus infinity bans."""
    penalties: npt.NDArray[np.float32]
    """[R, 3]: repetition, presence, frequency."""

    @property
    def longest(self) -> int:
        """Edits of the row that has most."""
        return int(np.diff(self.first).max(initial=0))


@dataclass(frozen=True, kw_only=True)
class LogitEdits:
    """`EditLists` on a device. The tensors may be longer than the lists: what lies behind is not read."""

    first: Tensor
    """int32 [R + 1]."""
    ids: Tensor
    """int32 [at least N]."""
    counts: Tensor
    """int32 [at least N]."""
    bias: Tensor
    """fp32 [at least N]."""
    penalties: Tensor
    """fp32 [R, 3], contiguous."""
    longest: int


def build_logit_edits(rows: Sequence[RowEdits], num_tokens: int) -> EditLists:
    """The lists for these rows. Raises ValueError for an id under 0, or counts that don't fit their ids."""
    edits = [_edits_of(row, num_tokens) for row in rows]
    first = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(ids) for ids, _, _ in edits], out=first[1:])
    penalties = [(row.repetition_penalty, row.presence_penalty, row.frequency_penalty) for row in rows]
    return EditLists(
        first=first,
        ids=np.concatenate([_no_ids(), *(ids for ids, _, _ in edits)]),
        counts=np.concatenate([_no_ids(), *(counts for _, counts, _ in edits)]),
        bias=np.concatenate([np.zeros(0, np.float32), *(bias for _, _, bias in edits)]),
        penalties=np.array(penalties, dtype=np.float32).reshape(len(rows), 3),
    )


def place_logit_edits(lists: EditLists, device: torch.device) -> LogitEdits:
    """The lists on a device, in tensors of their own."""
    names = ("first", "ids", "counts", "bias", "penalties")
    placed = {name: torch.from_numpy(getattr(lists, name)).to(device) for name in names}
    return LogitEdits(**placed, longest=lists.longest)


def check_logit_edits(edits: LogitEdits, logits: Tensor, num_tokens: int) -> None:
    """Edits fit [R, V] logits. Values are looked at if they lie on the CPU. Raises ValueError that names the tensor."""
    check_shape("first", edits.first, (logits.shape[0] + 1,))
    check_shape("penalties", edits.penalties, (logits.shape[0], 3))
    check_shape("ids", edits.ids, (None,))
    for name in ("counts", "bias"):
        check_shape(name, getattr(edits, name), edits.ids.shape)
    dtypes = {"first": torch.int32, "ids": torch.int32, "counts": torch.int32}
    for name in ("first", "ids", "counts", "bias", "penalties"):
        tensor = getattr(edits, name)
        check_dtype(name, tensor, (dtypes.get(name, torch.float32),))
        check_device({name: tensor}, logits.device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}; accepted: contiguous")
    if logits.device.type == "cpu":
        _check_values(edits, num_tokens)


def _check_values(edits: LogitEdits, num_tokens: int) -> None:
    first = edits.first.numpy()
    lengths = np.diff(first)
    if first[0] != 0 or (lengths < 0).any() or first[-1] > edits.ids.shape[0]:
        raise ValueError(f"first is {first.tolist()}; accepted: ascending from 0 to at most {edits.ids.shape[0]}")
    if lengths.max(initial=0) > edits.longest:
        raise ValueError(f"longest is {edits.longest}; accepted: {lengths.max()} or more")
    ids = edits.ids.numpy()[: first[-1]]
    if ids.size and not 0 <= ids.min() <= ids.max() < num_tokens:
        raise ValueError(f"ids holds {ids.min()} to {ids.max()}; accepted: 0 to {num_tokens - 1}")
    rows = np.repeat(np.arange(len(lengths)), lengths)
    if np.unique(rows * num_tokens + ids).size < ids.size:
        raise ValueError("ids holds an id twice in one row; accepted: distinct ids in a row")


_Edits = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]


def _edits_of(row: RowEdits, num_tokens: int) -> _Edits:
    """Ids, counts and biases of one row."""
    if row.token_ids.shape != row.token_counts.shape:
        raise ValueError(f"token_counts has shape {row.token_counts.shape}; accepted: {row.token_ids.shape}")
    seen, counts = (row.token_ids, row.token_counts) if row.is_penalised else (_no_ids(), _no_ids())
    biased = np.array([id_ for id_, _ in row.bias], dtype=np.int64)
    banned = np.array(row.banned_ids, dtype=np.int64)
    for name, ids in (("token_ids", seen), ("bias", biased), ("banned_ids", banned)):
        if ids.size and ids.min() < 0:
            raise ValueError(f"{name} holds {ids.min()}; accepted: ids from 0")
    is_token = seen < num_tokens
    seen, counts = seen[is_token], counts[is_token]
    if not biased.size and not banned.size:
        return seen.astype(np.int32), counts.astype(np.int32), np.zeros(len(seen), np.float32)
    ids = np.unique(np.concatenate([seen, biased, banned]))
    all_counts = np.full(len(ids), NOT_SEEN, dtype=np.int32)
    all_counts[np.searchsorted(ids, seen)] = counts
    bias = np.zeros(len(ids), dtype=np.float32)
    np.add.at(bias, np.searchsorted(ids, biased), np.array([value for _, value in row.bias], dtype=np.float32))
    bias[np.searchsorted(ids, banned)] = -np.inf
    is_token = ids < num_tokens
    return ids[is_token].astype(np.int32), all_counts[is_token], bias[is_token]
