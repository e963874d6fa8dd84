"""Pages in the layout of the Triton kernels, and what a step stages on its device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sapwood_server.model.config_json import config_from_json
from sapwood_server.model.device_kv import DeviceKV
from sapwood_server.model.staging import fetch, stage, stage_new
from sapwood_server.values.plan import PageCopy
from support.tiny_models import tiny_config

CPU = torch.device("cpu")
CONFIG = config_from_json(tiny_config("llama", 300, 512), Path("config.json"))
"""2 layers, 2 key-value heads of 8 dimensions."""


def numbered_kv() -> DeviceKV:
    """Five pages of 16 tokens in which every element differs, but for page 0."""
    kv = DeviceKV(CONFIG, 5, 16, torch.float32, CPU)
    kv.pages.copy_(torch.arange(kv.pages.numel()).view(kv.pages.shape))
    kv.reset_reserved_page()
    return kv


def test_a_layer_is_contiguous_and_a_view() -> None:
    kv = DeviceKV(CONFIG, 5, 16, torch.bfloat16, CPU)
    assert not kv.pages.any()
    layer = kv.layer(1)
    assert tuple(layer.shape) == (5, 2, 2, 16, 8)
    assert layer.is_contiguous()
    layer[3, 1, 0, 7] = 2.0
    assert torch.equal(kv.pages[1, 3, 1, 0, 7], torch.full((8,), 2.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_slots", [1, 9, 16])
def test_copies_take_the_first_slots_of_every_layer(num_slots: int) -> None:
    kv = numbered_kv()
    before = kv.pages.clone()
    kv.copy([PageCopy(source=2, target=4, num_slots=num_slots)])
    assert torch.equal(kv.pages[:, 4, :, :, :num_slots], before[:, 2, :, :, :num_slots])
    kv.pages[:, 4, :, :, :num_slots] = before[:, 4, :, :, :num_slots]
    assert torch.equal(kv.pages, before), "nothing else changed"


def test_sources_are_read_before_any_target_is_written() -> None:
    kv = numbered_kv()
    before = kv.pages.clone()
    kv.copy([PageCopy(1, 2, 16), PageCopy(2, 3, 7)])
    assert torch.equal(kv.pages[:, 2], before[:, 1])
    assert torch.equal(kv.pages[:, 3, :, :, :7], before[:, 2, :, :, :7])
    assert torch.equal(kv.pages[:, 3, :, :, 7:], before[:, 3, :, :, 7:])


def test_copies_that_cannot_be_are_refused_before_any_is_made() -> None:
    kv = numbered_kv()
    before = kv.pages.clone()
    with pytest.raises(ValueError, match="page is 5; accepted: 1 to 4"):
        kv.copy([PageCopy(3, 4, 16), PageCopy(1, 5, 4)])
    assert torch.equal(kv.pages, before)
    kv.copy([])
    assert torch.equal(kv.pages, before)


def test_staged_values_are_the_corner_of_their_buffer() -> None:
    buffer = torch.full((4, 6), 9, dtype=torch.int32)
    view = stage(buffer, np.arange(6, dtype=np.int32).reshape(2, 3))
    assert view.data_ptr() == buffer.data_ptr()
    assert buffer[:2, :3].tolist() == view.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert int((buffer == 9).sum()) == 4 * 6 - 6
    assert stage_new(np.array([1.5, 2.5]), CPU).tolist() == [1.5, 2.5]


@pytest.mark.parametrize("values", [np.zeros((5, 1), np.int32), np.zeros((1, 1), np.int64), np.zeros(3, np.int32)])
def test_what_does_not_fit_a_buffer_is_refused(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> None:
    with pytest.raises(ValueError, match=r"accepted: torch.int32, at most \[4, 6\]"):
        stage(torch.zeros(4, 6, dtype=torch.int32), values)


def test_what_is_fetched_from_the_cpu_is_not_copied() -> None:
    tensor = torch.arange(3)
    assert fetch((tensor,))[0].data_ptr() == tensor.data_ptr()
