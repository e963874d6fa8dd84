"""Pages and block tables."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from sapwood_server.model.config import ModelConfig
from sapwood_server.model.config_json import config_from_json
from sapwood_server.model.kv import BlockTables, PagedKV
from sapwood_server.values.plan import PageCopy
from support.tiny_models import tiny_config


def tiny_shape() -> ModelConfig:
    """2 layers, 2 key-value heads of 8 dimensions."""
    return config_from_json(tiny_config("llama", 300, 512), Path("config.json"))


def numbered_kv() -> PagedKV:
    """Five pages of 16 tokens in which every element differs, but for page 0."""
    kv = PagedKV(tiny_shape(), 5, 16, torch.float32)
    kv.pages.copy_(torch.arange(kv.pages.numel()).view(kv.pages.shape))
    kv.pages[:, :, :, 0] = 0
    return kv


def test_pages_start_as_zeros_and_a_layer_is_a_view() -> None:
    kv = PagedKV(tiny_shape(), 5, 16, torch.bfloat16)
    assert not kv.pages.any()
    layer = kv.layer(1)
    assert tuple(layer.shape) == (5, 2, 2, 16, 8)
    layer[3, 1, 0, 7] = 2.0
    assert torch.equal(kv.pages[1, 1, 0, 3, 7], torch.full((8,), 2.0, dtype=torch.bfloat16))


def resident_bytes() -> int:
    """What this process occupies of the machine's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_pages_take_memory_only_when_written() -> None:
    before = resident_bytes()
    kv = PagedKV(tiny_shape(), 2**19, 16, torch.float32)
    assert kv.pages.nbytes == 2**31
    assert resident_bytes() - before < 2**26


@pytest.mark.parametrize("num_slots", [1, 9, 16])
def test_copies_take_the_first_slots_of_every_layer(num_slots: int) -> None:
    kv = numbered_kv()
    before = kv.pages.clone()
    kv.copy([PageCopy(source=2, target=4, num_slots=num_slots)])
    assert torch.equal(kv.pages[:, :, :, 4, :num_slots], before[:, :, :, 2, :num_slots])
    kv.pages[:, :, :, 4, :num_slots] = before[:, :, :, 4, :num_slots]
    assert torch.equal(kv.pages, before), "nothing else changed"


def test_sources_are_read_before_any_target_is_written() -> None:
    """A page that is taken over may be a source too."""
    kv = numbered_kv()
    before = kv.pages.clone()
    kv.copy([PageCopy(1, 2, 16), PageCopy(2, 3, 16)])
    assert torch.equal(kv.pages[:, :, :, 2], before[:, :, :, 1])
    assert torch.equal(kv.pages[:, :, :, 3], before[:, :, :, 2])


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (PageCopy(0, 1, 4), "page is 0; accepted: 1 to 4"),
        (PageCopy(1, 0, 4), "page is 0; accepted: 1 to 4"),
        (PageCopy(1, 5, 4), "page is 5; accepted: 1 to 4"),
        (PageCopy(1, 2, 0), "num_slots is 0; accepted: 1 to 16"),
        (PageCopy(1, 2, 17), "num_slots is 17; accepted: 1 to 16"),
    ],
)
def test_copies_that_cannot_be_are_refused_before_any_is_made(copy: PageCopy, message: str) -> None:
    kv = numbered_kv()
    before = kv.pages.clone()
    with pytest.raises(ValueError, match=message):
        kv.copy([PageCopy(3, 4, 16), copy])
    assert torch.equal(kv.pages, before)


def test_store_and_gather_are_inverse() -> None:
    kv = PagedKV(tiny_shape(), 5, 16, torch.float32)
    tokens = torch.randn(2, 2, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([*range(48, 64), *range(16, 20)])
    kv.store(slots, tokens)
    for layer in range(kv.num_layers):
        assert torch.equal(kv.gather(layer, torch.tensor([3, 1]))[:, :, :20], tokens[layer])
    assert not kv.pages[:, :, :, 0].any()


def test_tables_grow_until_released() -> None:
    tables = BlockTables(16)
    assert tables.extend(7, [3, 1], 20).tolist() == [3, 1]
    assert tables.extend(7, [], 32).tolist() == [3, 1]
    assert tables.extend(7, [9], 33).tolist() == [3, 1, 9]
    assert tables.extend(8, [2], 1).tolist() == [2]
    tables.release([7, 99])
    assert len(tables) == 1
    assert tables.extend(7, [5], 16).tolist() == [5], "a released id starts empty"


def test_tables_of_many_long_sequences() -> None:
    """Past the room that they start with, in both directions; released ones give theirs to others."""
    tables = BlockTables(16)
    for sequence_id in range(300):
        tables.extend(sequence_id, range(sequence_id, sequence_id + 3), 48)
    tables.extend(5, range(1000, 1500), 16 * 503)
    tables.release(range(10, 290))
    assert tables.extend(400, [77], 16).tolist() == [77]
    gathered = tables.gather([299, 5, 400])
    assert gathered.shape == (3, 503)
    assert gathered.dtype == np.int32
    assert gathered[0, :3].tolist() == [299, 300, 301]
    assert gathered[1].tolist() == [5, 6, 7, *range(1000, 1500)]
    assert gathered[2, 0] == 77
    assert len(tables) == 21


def test_a_table_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 7 has 1 pages for 17 tokens"):
        BlockTables(16).extend(7, [3], 17)
