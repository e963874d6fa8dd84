"""Dense copies of decoding sequences: contents, growth, budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sapwood_server.model.config_json import config_from_json
from sapwood_server.model.dense_kv import DenseCopy, DenseKV
from support.tiny_models import tiny_config

CONFIG = config_from_json(tiny_config("llama", 300, 512), Path("config.json"))
BYTES_PER_TOKEN = 4 * 2 * 2 * 2 * 8
"""fp32 keys and values of 2 layers, 2 heads, 8 dimensions."""
GENEROUS = 10**6


def gathered(num_tokens: int) -> torch.Tensor:
    """Pages' tokens, a few more than asked for."""
    return torch.randn(2, 2, 2, num_tokens + 5, 8, generator=torch.Generator().manual_seed(num_tokens))


def filled(dense: DenseKV, sequence_id: int, num_tokens: int) -> DenseCopy:
    copy = dense.create(sequence_id, num_tokens)
    assert copy is not None
    copy.fill(gathered(num_tokens), num_tokens)
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_holds_the_tokens_of_its_pages(dtype: torch.dtype) -> None:
    copy = filled(DenseKV(CONFIG, dtype, GENEROUS, 512), 1, 20)
    tokens = gathered(20)[:, :, :, :20].to(dtype)
    assert copy.dtype == dtype
    assert torch.equal(copy.keys[:, :, :20], tokens[:, 0])
    assert torch.equal(copy.values[:, :, :20], tokens[:, 1])


def test_half_the_bytes_a_number_hold_twice_the_tokens() -> None:
    wide, narrow = (DenseKV(CONFIG, dtype, 200 * BYTES_PER_TOKEN, 512) for dtype in (torch.float32, torch.bfloat16))
    assert wide.create(1, 100) is None
    assert narrow.create(1, 100) is not None
    assert narrow.num_bytes <= 200 * BYTES_PER_TOKEN


def test_a_copy_is_found_only_at_its_own_length() -> None:
    dense = DenseKV(CONFIG, torch.float32, GENEROUS, 512)
    copy = filled(dense, 1, 20)
    assert dense.get(1, 20) is copy
    assert dense.get(2, 20) is None
    assert dense.get(1, 25) is None, "five tokens went by that it did not see"
    assert len(dense) == 0
    assert dense.num_bytes == 0


def test_a_full_copy_moves_to_a_larger_one() -> None:
    dense = DenseKV(CONFIG, torch.float32, GENEROUS, 512)
    copy = filled(dense, 1, 20)
    copy.num_tokens = copy.capacity
    copy.keys.normal_()
    copy.values.normal_()
    larger = dense.get(1, copy.capacity)
    assert larger is not None
    assert larger.capacity > copy.capacity
    assert larger.num_tokens == copy.capacity
    assert torch.equal(larger.keys[:, :, : copy.capacity], copy.keys)
    assert torch.equal(larger.values[:, :, : copy.capacity], copy.values)
    assert dense.num_bytes == larger.capacity * BYTES_PER_TOKEN


def test_the_budget_holds_and_comes_back() -> None:
    """Two copies fit; a third does not until one is released; growth beyond the budget gives the copy up."""
    one = filled(DenseKV(CONFIG, torch.float32, GENEROUS, 512), 1, 20).capacity * BYTES_PER_TOKEN
    dense = DenseKV(CONFIG, torch.float32, 2 * one, 512)
    first = filled(dense, 1, 20)
    filled(dense, 2, 20)
    assert dense.num_bytes == 2 * one
    assert dense.create(3, 20) is None
    first.num_tokens = first.capacity
    assert dense.get(1, first.capacity) is None
    assert len(dense) == 1
    filled(dense, 3, 20)
    dense.release([2, 3, 4])
    assert dense.num_bytes == 0


def test_a_copy_never_has_much_more_room_than_the_context() -> None:
    copy = DenseKV(CONFIG, torch.float32, GENEROUS, 100).create(1, 90)
    assert copy is not None
    assert 100 <= copy.capacity <= 144


def test_no_budget_no_copy() -> None:
    assert DenseKV(CONFIG, torch.float32, 0, 512).create(1, 1) is None
