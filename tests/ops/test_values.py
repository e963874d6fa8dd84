"""Sequences as the CPU plans them, and the same as tensors."""

from __future__ import annotations

import torch

from sapwood_kernels.values import PagedSequence, batch_of


def test_a_batch_of_sequences() -> None:
    sequences = [
        PagedSequence(0, 2, torch.tensor([7, 3]), 20, torch.float32),
        PagedSequence(2, 1, torch.tensor([5]), 4, torch.float32),
    ]
    batch = batch_of(sequences)
    assert batch.block_table.tolist() == [[7, 3], [5, 0]]
    assert batch.num_keys.tolist() == [20, 4]
    assert batch.first_query.tolist() == [0, 2, 3]
    assert {batch.block_table.dtype, batch.num_keys.dtype, batch.first_query.dtype} == {torch.int32}


def test_a_mask_hides_later_keys_and_is_left_out_where_causality_says_it() -> None:
    pages = torch.tensor([1])
    mask = PagedSequence(0, 2, pages, 4, torch.bfloat16).mask
    assert mask is not None
    assert mask.dtype == torch.bfloat16
    assert mask.isinf().tolist() == [[False, False, False, True], [False, False, False, False]]
    assert PagedSequence(0, 1, pages, 4, torch.float32).mask is None
    assert PagedSequence(0, 4, pages, 4, torch.float32).mask is None
