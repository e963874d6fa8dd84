"""The forward pass by the Triton kernels, in the interpreter: logits are transformers' and the CPU runner's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sapwood_kernels.decode_layout import resident_grid
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.device_step import DeviceLimits, StepBuffers
from sapwood_server.model.devices import DeviceChoice, DeviceKind
from sapwood_server.model.kernel_configs import find_kernel_configs
from sapwood_server.model.kv import BlockTables, PageBounds
from sapwood_server.model.placement import place_rows
from sapwood_server.model.step_inputs import idle_step, pad_step, step_inputs
from sapwood_server.values.plan import PageCopy, Phase, RowPlan, StepPlan
from support.device_runners import FEW_HEADS, make_device_model, make_device_runner
from support.scale import scaled, suite_scale
from support.stepping import DrivenSequence, Driver, make_config, make_runner
from support.tiny_oracle import oracle_logits

TOLERANCE = 1e-4
TOKEN_IDS = [3 + (17 * position * position + position) % 240 for position in range(48)]
"""A token takes the interpreter some 40 ms in two layers."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 128}),
}


class DeviceCase(NamedTuple):
    """A model's folder and the oracle's logits for TOKEN_IDS."""

    folder: Path
    logits: Tensor


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_device_model(tmp_path_factory.mktemp("device") / "model", overrides=FEW_HEADS)


@pytest.fixture(name="case", scope="module", params=MODELS)
def case_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DeviceCase:
    architecture, overrides = MODELS[request.param]
    folder = make_device_model(tmp_path_factory.mktemp(request.param) / "model", architecture, overrides)
    return DeviceCase(folder, oracle_logits(folder, TOKEN_IDS))


def check_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= TOLERANCE


def page_sizes(case: DeviceCase) -> Sequence[int]:
    """All three at full scale; in the slice one for each model, so that each is there once."""
    sizes = (16, 32, 64)
    return sizes if suite_scale() == 1 else (sizes[len(case.folder.parent.name) % 3],)


def test_chunks_and_decode_steps_of_several_sequences_at_once(case: DeviceCase) -> None:
    """Rows of both phases in the same steps, in an order that changes; one sequence leaves early."""
    for page_size in page_sizes(case):
        driver = Driver(make_device_runner(case.folder, page_size=page_size))
        sequences = [driver.sequence() for _ in range(2)]
        ends = [36, 14]
        found: list[list[Tensor]] = [[] for _ in sequences]
        for step in range(100):
            live = [i for i in ((step + i) % 2 for i in range(2)) if sequences[i].num_written < ends[i]]
            if not live:
                break
            rows = [next_row(sequences[i], chunk=11 + 8 * i, prefilled=ends[i] - 2) for i in live]
            for i, logits in zip(live, driver.logits(rows), strict=True):
                found[i].append(logits)
                if sequences[i].num_written == ends[i]:
                    driver.release(sequences[i])
        for parts, end in zip(found, ends, strict=True):
            check_close(torch.cat(parts), case.logits[:end])


def next_row(sequence: DrivenSequence, chunk: int, prefilled: int) -> RowPlan:
    start = sequence.num_written
    if start >= prefilled:
        return sequence.row(TOKEN_IDS[start : start + 1], Phase.DECODE)
    return sequence.row(TOKEN_IDS[start : min(start + chunk, prefilled)], Phase.PREFILL)


def test_fp16_rounds_and_stays_close(folder: Path) -> None:
    wanted = Driver(make_runner(make_config(folder))).teacher_forced(TOKEN_IDS, 40, 46)
    rounded = Driver(make_device_runner(folder, dtype="float16")).teacher_forced(TOKEN_IDS, 40, 46)
    assert 0 < float((rounded - wanted).norm() / wanted.norm()) < 0.004


def test_a_cached_prefix_gives_the_same_bits(folder: Path) -> None:
    """Whole pages shared, the last one copied as far as it is shared; with products of a fixed number of rows."""
    driver = Driver(make_device_runner(folder, deterministic=True))
    first = driver.sequence()
    (whole,) = driver.logits([first.row(TOKEN_IDS, Phase.PREFILL)])
    for shared in (37, 16, 47, 32, 15, 1)[: scaled(6, 3)]:
        second = driver.sequence()
        num_pages, partial = divmod(shared, driver.page_size)
        pages, copies = first.pages[:num_pages], []
        if partial:
            copies = [PageCopy(first.pages[num_pages], driver.free_pages.pop(), partial)]
            pages = [*pages, copies[0].target]
        second.adopt(pages, shared)
        (rest,) = driver.logits([second.row(TOKEN_IDS[shared:], Phase.PREFILL)], copies)
        assert torch.equal(rest, whole[shared:])


def test_deterministic_logits_are_the_same_bits_however_they_are_computed(folder: Path) -> None:
    """In one chunk, in chunks, by decode steps, beside others, and in padded batches as a graph has them."""
    num_tokens = 24
    tokens = TOKEN_IDS[:num_tokens]
    driver = Driver(make_device_runner(folder, deterministic=True))
    whole = driver.teacher_forced(tokens, num_tokens)
    assert torch.equal(driver.teacher_forced(tokens, 7, num_tokens - 3), whole)
    padded = Driver(make_device_runner(folder, deterministic=True, max_num_seqs=2, graphs=True), seed=5)
    padded.runner.capture_graphs()
    other, mine = padded.sequence(), padded.sequence()
    padded.logits([other.row(TOKEN_IDS[30:34], Phase.PREFILL), mine.row(tokens[:-2], Phase.PREFILL)])
    assert torch.equal(padded.logits([mine.row(tokens[-2:-1], Phase.DECODE)])[0], whole[-2:-1])
    rows = [other.row([8], Phase.DECODE), mine.row(tokens[-1:], Phase.DECODE)]
    assert torch.equal(padded.logits(rows)[1], whole[-1:])


def test_other_bits_without_it(folder: Path) -> None:
    """What the flag is for: by default, products of another number of rows round otherwise."""
    driver = Driver(make_device_runner(folder))
    whole = driver.teacher_forced(TOKEN_IDS[:24], 24)
    assert not torch.equal(driver.teacher_forced(TOKEN_IDS[:24], 7, 22), whole)


def decoded(driver: Driver, num_sequences: int, num_steps: int) -> list[Tensor]:
    """Logits of decode steps of some sequences of different lengths, [num_sequences, vocab_size] each."""
    sequences = [driver.sequence() for _ in range(num_sequences)]
    starts = [TOKEN_IDS[: 5 + 6 * i] for i in range(num_sequences)]
    driver.logits([s.row(tokens, Phase.PREFILL) for s, tokens in zip(sequences, starts, strict=True)])
    steps = ([s.row([30 + step], Phase.DECODE) for s in sequences] for step in range(num_steps))
    return [torch.cat(driver.logits(rows)) for rows in steps]


def test_padding_touches_nothing_real(folder: Path) -> None:
    """Three rows in a batch of four, in a pool that is full of NaN: they get what they get alone, whatever a page was
    before it was theirs; a page that was nobody's stays as it was, and page 0 stays zero."""
    wanted = decoded(Driver(make_device_runner(folder, max_num_seqs=4)), 3, 2)
    runner = make_device_runner(folder, graphs=True, max_num_seqs=4)
    for page in range(1, runner.info.num_pages):
        runner.kv_pages(page).fill_(float("nan"))
    runner.capture_graphs()
    driver = Driver(runner)
    for found, expected in zip(decoded(driver, 3, 2), wanted, strict=True):
        check_close(found, expected)
    assert not runner.kv_pages(0).any()
    assert all(bool(runner.kv_pages(page).isnan().all()) for page in driver.free_pages)


def test_a_capture_restores_the_reserved_page(folder: Path) -> None:
    """(Of batches of one row: more sequences may run than a step has tokens for.)"""
    runner = make_device_runner(folder, graphs=True, max_num_seqs=3, max_batched_tokens=1)
    runner.kv_pages(0).fill_(1.0)
    runner.capture_graphs()
    assert not runner.kv_pages(0).any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graphs_tensors_stay_where_they_are(folder: Path, deterministic: bool) -> None:
    """What a graph of four rows has captured is what a later step of three is loaded into: places, shapes, strides."""
    config = load_model_config(resolve_model(str(folder)))
    limits = DeviceLimits(num_tokens=8, num_sequences=4, max_model_len=256, page_size=16, num_pages=20)
    device = DeviceChoice(kind=DeviceKind.INTERPRETER, detail="", reason="")
    kernels = find_kernel_configs(config, torch.float32, device)
    grid = None if deterministic else resident_grid(kernels.decode, 1)
    buffers = StepBuffers(config, kernels, limits, grid, device.torch_device)
    captured = tensors_of(buffers.load(idle_step(4, decode_by_prefill=deterministic)))
    tables = BlockTables(16)
    rows = [
        RowPlan(sequence_id=i, token_ids=[5], start=30 + 40 * i, phase=Phase.DECODE, new_pages=range(1, 9))
        for i in range(3)
    ]
    placed = place_rows(StepPlan(step=0, rows=tuple(rows)), tables, PageBounds(20, 16))
    step = step_inputs(placed, tables, 16, decode_by_prefill=deterministic)
    assert tensors_of(buffers.load(pad_step(step, 4))) == captured


def tensors_of(value: object) -> list[tuple[object, ...]]:
    """Place, shape and strides of every tensor in a dataclass, and its numbers, which a graph keeps as well."""
    if isinstance(value, Tensor):
        return [(value.data_ptr(), tuple(value.shape), value.stride())]
    if dataclasses.is_dataclass(value):
        return [found for field in dataclasses.fields(value) for found in tensors_of(getattr(value, field.name))]
    return [(value,)]


def test_a_step_of_more_than_the_buffers_hold_is_refused(folder: Path) -> None:
    runner = make_device_runner(folder, max_batched_tokens=16, max_num_seqs=2)
    driver = Driver(runner)
    with pytest.raises(ValueError, match=r"\[17\]; accepted: torch.int64, at most \[16\]"):
        driver.logits([driver.sequence().row(TOKEN_IDS[:17], Phase.PREFILL)])
    rows = [driver.sequence().row([5], Phase.PREFILL) for _ in range(3)]
    with pytest.raises(ValueError, match=r"at most \[2, 32\]"):
        driver.logits(rows)


def test_a_page_is_written_in_the_kernels_layout(folder: Path) -> None:
    """The same contents as the CPU's pages, up to rounding."""
    found, wanted = Driver(make_device_runner(folder)), Driver(make_runner(make_config(folder)))
    pages = []
    for driver in (found, wanted):
        sequence = driver.sequence()
        driver.logits([sequence.row(TOKEN_IDS[:16], Phase.PREFILL)])
        pages.append(driver.runner.kv_pages(sequence.pages[0]))
    assert pages[0].shape == pages[1].shape
    assert torch.allclose(pages[0], pages[1], atol=1e-5)


def test_a_released_sequence_starts_anew(folder: Path) -> None:
    runner = make_device_runner(folder)
    row = RowPlan(sequence_id=1, token_ids=[1, 2, 3], start=0, phase=Phase.PREFILL, new_pages=[4])
    runner.execute(StepPlan(step=0, rows=(row,)))
    again = RowPlan(sequence_id=1, token_ids=[4, 5], start=3, phase=Phase.PREFILL, new_pages=())
    with pytest.raises(ValueError, match="sequence 1 has 0 pages for 5 tokens"):
        runner.execute(StepPlan(step=1, rows=(again,), released=(1, 2)))
