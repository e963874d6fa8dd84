"""Attention's formulas against torch's own and against arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sapwood_kernels import reference_attention
from sapwood_kernels.values import AttentionRule, KVScales, PagedBatch
from support.ops import assert_close, make_kv, random_tensor


def one_sequence(pages: list[int], num_keys: int, num_queries: int) -> PagedBatch:
    return PagedBatch(
        torch.tensor([pages], dtype=torch.int32),
        torch.tensor([num_keys], dtype=torch.int32),
        torch.tensor([0, num_queries], dtype=torch.int32),
    )


def two_keys() -> tuple[Tensor, Tensor, PagedBatch]:
    """One query of one head whose products with two keys are 1 and 3; their values are 10 and 20."""
    kv = torch.zeros(2, 2, 1, 16, 1)
    kv[1, 0, 0, :2, 0] = torch.tensor([1.0, 3.0])
    kv[1, 1, 0, :2, 0] = torch.tensor([10.0, 20.0])
    return torch.ones(1, 1, 1), kv, one_sequence([1], 2, 1)


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("num_queries", [1, 5, 40])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_paged_attention_is_torchs_on_contiguous_tokens(page_size: int, num_queries: int, window: int | None) -> None:
    keys, values = random_tensor(2, 40, 8, seed=1), random_tensor(2, 40, 8, seed=2)
    q = random_tensor(num_queries, 6, 8)
    kv = make_kv(6, 2, page_size, 8, torch.float32)
    pages = [4, 2, 5][: -(-40 // page_size)]
    for position in range(40):
        page, slot = pages[position // page_size], position % page_size
        kv[page, 0, :, slot], kv[page, 1, :, slot] = keys[:, position], values[:, position]
    visible = torch.ones(num_queries, 40, dtype=torch.bool).tril(40 - num_queries)
    if window is not None:
        visible = visible.triu(40 - num_queries - window + 1)
    wanted = functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys.repeat_interleave(3, 0), values.repeat_interleave(3, 0), visible, scale=0.7
    ).transpose(0, 1)
    batch = one_sequence(pages, 40, num_queries)
    found = reference_attention.paged_prefill(q, kv, batch, None, AttentionRule(0.7, window=window))
    assert_close(found, wanted, factor=2)


@pytest.mark.parametrize(
    ("rule", "scores", "sink"),
    [
        (AttentionRule(0.5), (0.5, 1.5), None),
        (AttentionRule(0.5, softcap=2.0), (2 * math.tanh(0.25), 2 * math.tanh(0.75)), None),
        (AttentionRule(0.5, sinks=torch.tensor([1.25])), (0.5, 1.5), 1.25),
        (AttentionRule(0.5, softcap=2.0, sinks=torch.tensor([1.25])), (2 * math.tanh(0.25), 2 * math.tanh(0.75)), 1.25),
    ],
)
def test_softcap_and_sinks_by_hand(rule: AttentionRule, scores: tuple[float, float], sink: float | None) -> None:
    q, kv, batch = two_keys()
    weights = [math.exp(score) for score in scores]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink))
    wanted = (10 * weights[0] + 20 * weights[1]) / total
    assert_close(reference_attention.paged_prefill(q, kv, batch, None, rule), torch.full((1, 1, 1), wanted), factor=2)


def test_scales_multiply_what_is_read() -> None:
    q, kv, batch = two_keys()
    scaled = kv / torch.tensor([4.0, 8.0]).view(1, 2, 1, 1, 1)
    found = reference_attention.paged_prefill(q, scaled, batch, None, AttentionRule(1.0), KVScales(4.0, 8.0))
    assert_close(found, reference_attention.paged_prefill(q, kv, batch, None, AttentionRule(1.0)))


def test_sequences_without_queries_and_queries_without_keys() -> None:
    """The second sequence has no query, the third no key: its row is zero."""
    kv = make_kv(4, 1, 16, 4, torch.float32)
    q = random_tensor(3, 2, 4)
    batch = PagedBatch(
        torch.tensor([[1], [2], [3]], dtype=torch.int32),
        torch.tensor([5, 9, 0], dtype=torch.int32),
        torch.tensor([0, 2, 2, 3], dtype=torch.int32),
    )
    found = reference_attention.paged_prefill(q, kv, batch, None, AttentionRule(1.0))
    alone = reference_attention.paged_prefill(q[:2], kv, one_sequence([1], 5, 2), None, AttentionRule(1.0))
    assert torch.equal(found, torch.cat((alone, torch.zeros(1, 2, 4))))
