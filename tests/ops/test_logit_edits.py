"""Edit lists: one edit an id, whatever asks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sapwood_kernels.logit_edits import (
    NOT_SEEN,
    RowEdits,
    build_logit_edits,
    check_logit_edits,
    place_logit_edits,
)


def ids(*numbers: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(numbers, dtype=np.int32)


PENALISED = RowEdits(
    token_ids=ids(9, 2, 7), token_counts=ids(0, 3, 1), repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=2
)


def test_rows_without_edits_take_no_room() -> None:
    lists = build_logit_edits([RowEdits(), PENALISED, RowEdits()], 100)
    assert lists.first.tolist() == [0, 0, 3, 3]
    assert lists.ids.tolist() == [9, 2, 7]
    assert lists.counts.tolist() == [0, 3, 1]
    assert lists.bias.tolist() == [0, 0, 0]
    assert lists.penalties.tolist() == [[1, 0, 0], [1.5, 0.5, 2], [1, 0, 0]]
    assert lists.longest == 3


def test_an_id_that_is_seen_biased_and_banned_is_edited_once() -> None:
    row = RowEdits(
        bias=((7, 1.0), (4, -2.0), (7, 0.5), (3, 5.0)),
        banned_ids=(3, 11),
        token_ids=ids(9, 2, 7, 11),
        token_counts=ids(0, 3, 1, 2),
        presence_penalty=1.0,
    )
    lists = build_logit_edits([row], 100)
    assert lists.ids.tolist() == [2, 3, 4, 7, 9, 11]
    assert lists.counts.tolist() == [3, NOT_SEEN, NOT_SEEN, 1, 0, 2]
    assert lists.bias.tolist() == [0, -np.inf, -2, 1.5, 0, -np.inf]


def test_tokens_are_no_edits_without_a_penalty() -> None:
    assert build_logit_edits([RowEdits(token_ids=ids(1, 2), token_counts=ids(1, 1))], 100).longest == 0


@pytest.mark.parametrize("bias", [(), ((98, 1.0), (99, 1.0))])
def test_padding_ids_have_no_edits(bias: tuple[tuple[int, float], ...]) -> None:
    row = RowEdits(bias=bias, token_ids=ids(97, 99), token_counts=ids(1, 1), presence_penalty=1.0)
    lists = build_logit_edits([row], 99)
    assert lists.ids.tolist() == [97, 98][: 1 + len(bias) // 2]


def test_no_rows() -> None:
    lists = build_logit_edits([], 99)
    assert (lists.first.tolist(), lists.longest, lists.penalties.shape) == ([0], 0, (0, 3))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (RowEdits(bias=((-1, 1.0),)), "bias holds -1; accepted: ids from 0"),
        (RowEdits(banned_ids=(5, -3)), "banned_ids holds -3"),
        (RowEdits(token_ids=ids(-7), token_counts=ids(1), presence_penalty=1), "token_ids holds -7"),
        (RowEdits(token_ids=ids(7), token_counts=ids(1, 2)), "token_counts has shape"),
    ],
)
def test_bad_rows_are_named(row: RowEdits, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_logit_edits([row], 99)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": torch.tensor([0, 3], dtype=torch.int32)}, "first has shape"),
        ({"first": torch.tensor([0, 3, 2], dtype=torch.int32)}, r"first is \[0, 3, 2\]; accepted: ascending"),
        ({"first": torch.tensor([0, 2, 6], dtype=torch.int32)}, "accepted: ascending from 0 to at most 3"),
        ({"ids": torch.tensor([9, 2, 7])}, "ids is torch.int64; accepted: torch.int32"),
        ({"ids": torch.tensor([9, -1, 7], dtype=torch.int32)}, "ids holds -1 to 9; accepted: 0 to 98"),
        ({"ids": torch.tensor([99, 2, 7], dtype=torch.int32)}, "ids holds 2 to 99"),
        ({"ids": torch.tensor([9, 7, 7], dtype=torch.int32)}, "ids holds an id twice in one row"),
        ({"counts": torch.zeros(2, dtype=torch.int32)}, "counts has shape"),
        ({"bias": torch.zeros(3, dtype=torch.float64)}, "bias is torch.float64"),
        ({"bias": torch.zeros(3, device="meta")}, "bias is on meta"),
        ({"penalties": torch.zeros(1, 3)}, "penalties has shape"),
        ({"penalties": torch.zeros(3, 2).T}, "penalties has strides"),
        ({"longest": 2}, "longest is 2; accepted: 3 or more"),
    ],
)
def test_bad_tensors_are_named(change: dict[str, Any], message: str) -> None:
    edits = place_logit_edits(build_logit_edits([PENALISED, RowEdits()], 99), torch.device("cpu"))
    check_logit_edits(edits, torch.zeros(2, 128), 99)
    with pytest.raises(ValueError, match=message):
        check_logit_edits(type(edits)(**vars(edits) | change), torch.zeros(2, 128), 99)
