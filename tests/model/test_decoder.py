"""Tiny random models of every architecture and rotary scaling: logits are transformers', however they are computed."""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from sapwood_kernels import cpu
from sapwood_kernels.dispatch import CpuOps
from sapwood_kernels.values import AttentionRule, PagedBatch, PagedSequence
from sapwood_server.values.plan import PageCopy, Phase, RowPlan
from support.stepping import DrivenSequence, Driver, make_config, make_runner
from support.tiny_models import make_tiny_model
from support.tiny_oracle import oracle_logits

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN | {"beta_fast": 16.0, "attention_factor": 1.3}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-one-kv-head": ("qwen3", {"num_key_value_heads": 1, "head_dim": 24}),
}
TOKEN_IDS = [3 + (17 * position * position + position) % 240 for position in range(150)]


class TinyCase(NamedTuple):
    """A model's folder and the oracle's logits for TOKEN_IDS."""

    folder: Path
    logits: Tensor


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCase:
    architecture, overrides = MODELS[request.param]
    folder = make_tiny_model(tmp_path_factory.mktemp(request.param) / "model", architecture, overrides=overrides)
    return TinyCase(folder, oracle_logits(folder, TOKEN_IDS))


def check_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_any_chunking_and_page_size(case: TinyCase, page_size: int) -> None:
    driver = Driver(make_runner(make_config(case.folder, page_size=page_size)))
    for chunk in (1, 7, 64, len(TOKEN_IDS)):
        check_close(driver.teacher_forced(TOKEN_IDS, chunk), case.logits)


@pytest.mark.parametrize("num_prefilled", [0, 1, 16, 100])
def test_decode_steps(case: TinyCase, num_prefilled: int) -> None:
    """From dense copies; after a first token or chunk, since a sequence's first token is never a decode row."""
    driver = Driver(make_runner(make_config(case.folder)))
    check_close(driver.teacher_forced(TOKEN_IDS, 50, max(1, num_prefilled)), case.logits)


def test_decode_from_pages(case: TinyCase) -> None:
    """Without memory for dense copies."""
    runner = make_runner(make_config(case.folder), dense_bytes=0)
    check_close(Driver(runner).teacher_forced(TOKEN_IDS, 50, 100), case.logits)


def test_batched_with_others(case: TinyCase) -> None:
    """Chunks and decode rows of four sequences in the same steps, in an order that changes; one leaves early."""
    driver = Driver(make_runner(make_config(case.folder)))
    sequences = [driver.sequence() for _ in range(4)]
    ends = [len(TOKEN_IDS), 90, 150, 61]
    found: list[list[Tensor]] = [[] for _ in sequences]
    for step in range(200):
        turn = [(step + i) % 4 for i in range(4)]
        live = [i for i in turn if sequences[i].num_written < ends[i]]
        if not live:
            break
        rows = [next_row(sequences[i], ends[i], chunk=5 + 9 * i, prefilled=40 + 10 * i) for i in live]
        for i, logits in zip(live, driver.logits(rows), strict=True):
            found[i].append(logits)
            if sequences[i].num_written == ends[i]:
                driver.release(sequences[i])
    for parts, end in zip(found, ends, strict=True):
        check_close(torch.cat(parts), case.logits[:end])


def next_row(sequence: DrivenSequence, end: int, chunk: int, prefilled: int) -> RowPlan:
    start = sequence.num_written
    if start >= prefilled:
        return sequence.row(TOKEN_IDS[start : start + 1], Phase.DECODE)
    return sequence.row(TOKEN_IDS[start : min(start + chunk, end, prefilled)], Phase.PREFILL)


@pytest.mark.parametrize("shared", [1, 15, 16, 37, 149])
def test_a_prefix_of_another_sequence(case: TinyCase, shared: int) -> None:
    """Whole pages shared, the last one copied as far as it is shared."""
    driver = Driver(make_runner(make_config(case.folder)))
    first, second = driver.sequence(), driver.sequence()
    driver.logits([first.row(TOKEN_IDS, Phase.PREFILL)])
    whole, partial = divmod(shared, driver.page_size)
    pages, copies = first.pages[:whole], []
    if partial:
        copies = [PageCopy(first.pages[whole], driver.free_pages.pop(), partial)]
        pages = [*pages, copies[0].target]
    second.adopt(pages, shared)
    check_close(logits_of(driver, second, TOKEN_IDS[shared:], copies), case.logits[shared:])
    check_close(logits_of(driver, first, [5], []), logits_of(driver, second, [5], []))


def logits_of(driver: Driver, sequence: DrivenSequence, token_ids: Sequence[int], copies: Sequence[PageCopy]) -> Tensor:
    (logits,) = driver.logits([sequence.row(token_ids, Phase.PREFILL)], copies)
    return logits


class WrongOps(types.ModuleType):
    """The fast ops but for one: attention's scale is off by a thousandth."""

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu, name)

    def paged_prefill(
        self, q: Tensor, kv: Tensor, batch: PagedBatch, work: Sequence[PagedSequence], rule: AttentionRule
    ) -> Tensor:
        return cpu.paged_prefill(q, kv, batch, work, AttentionRule(rule.scale * 1.001))


def test_a_wrong_op_is_noticed(case: TinyCase) -> None:
    """The tolerance has teeth."""
    runner = make_runner(make_config(case.folder), ops=cast(CpuOps, WrongOps("wrong")))
    with pytest.raises(AssertionError):
        check_close(Driver(runner).teacher_forced(TOKEN_IDS, 64), case.logits)


@pytest.mark.parametrize("dense_bytes", [None, 0])
@pytest.mark.parametrize(("dtype", "accepted"), [("bfloat16", 0.03), ("float16", 0.004)])
def test_dtypes_that_round_stay_close(case: TinyCase, dtype: str, accepted: float, dense_bytes: int | None) -> None:
    """Chunks, then decode steps from dense copies or from pages. The error is relative, of all logits together."""
    runner = make_runner(make_config(case.folder, dtype=dtype), dense_bytes=dense_bytes)
    found = Driver(runner).teacher_forced(TOKEN_IDS, 50, 100)
    for part in (slice(0, 100), slice(100, None)):
        error = (found[part] - case.logits[part]).norm() / case.logits[part].norm()
        assert 0 < float(error) < accepted
