"""The formulas of decode: merged, its splits are attention over all keys."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sapwood_kernels import reference_attention, reference_decode
from sapwood_kernels.values import AttentionRule
from support.decode_runs import DecodeRun, decode_inputs, formula
from support.ops import assert_close, random_tensor
from support.paged_world import WorldShape, make_world

LENGTHS = [1, 63, 64, 65, 200]


@pytest.mark.parametrize(
    "rule",
    [
        AttentionRule(0.2),
        AttentionRule(0.2, window=70),
        AttentionRule(0.2, softcap=1.5),
        AttentionRule(0.2, window=1, sinks=random_tensor(4)),
    ],
)
def test_merged_splits_are_attention_over_all_keys(rule: AttentionRule) -> None:
    world = make_world(LENGTHS, WorldShape())
    found = formula(world, DecodeRun(rule=rule), padding=1)
    inputs = decode_inputs(world, DecodeRun(rule=rule), padding=1)
    assert_close(found.out, reference_attention.paged_prefill(inputs.q, inputs.kv, inputs.batch, None, rule))
    assert torch.equal(found.lse[-1], torch.full((4,), float("-inf")))


def test_a_partial_by_hand() -> None:
    """Scores of 1 and 3: in units of log 2, the larger one, the weights relative to it, and their sums."""
    world = make_world([2], WorldShape(num_heads=1, num_kv_heads=1))
    world.queries[0][:] = 0.0
    world.queries[0][..., 0] = 1.0
    world.kv[world.block_table[0, 0], 0, 0, :2, 0] = torch.tensor([1.0, 3.0])
    world.kv[world.block_table[0, 0], 1, 0, :2] = torch.tensor([[10.0], [20.0]])
    partials = formula(world, DecodeRun(rule=AttentionRule(1.0))).partials
    weight = math.exp(-2)
    assert_close(partials.maximum[0], torch.tensor([3 / math.log(2)]))
    assert_close(partials.total[0], torch.tensor([1 + weight]))
    assert_close(partials.acc[0], torch.full((1, 64), 20 + 10 * weight))
    assert torch.isnan(partials.acc[1:]).all()


def test_lse_is_that_of_all_scores_and_the_sink() -> None:
    world = make_world([70], WorldShape(num_heads=2, num_kv_heads=1))
    sinks = torch.tensor([0.5, 2.0])
    run = DecodeRun(rule=AttentionRule(0.2, sinks=sinks))
    inputs = decode_inputs(world, run)
    keys, _ = reference_attention.gather_keys(inputs.kv, inputs.batch.block_table[0], range(70), world.shape.scales)
    scores = reference_attention.capped_scores(inputs.q[0], keys, run.rule)[0]
    wanted = torch.logsumexp(torch.cat((scores, sinks.double()[:, None]), dim=1), dim=1).float()
    assert_close(formula(world, run).lse[0], wanted)


def test_splits_of_a_row() -> None:
    work = decode_inputs(make_world([200], WorldShape()), DecodeRun()).work
    rule = AttentionRule(1.0)
    visible = reference_decode.visible_splits
    assert visible(0, work, rule) == []
    assert visible(65, work, rule) == [(0, range(64)), (1, range(64, 65))]
    assert visible(130, work, replace(rule, window=70)) == [
        (0, range(60, 64)),
        (1, range(64, 128)),
        (2, range(128, 130)),
    ]
    assert visible(128, work, replace(rule, window=64)) == [(1, range(64, 128))]
