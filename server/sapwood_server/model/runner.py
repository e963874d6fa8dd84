"""The runner: carries out a step plan on the CPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from sapwood_kernels.dispatch import CpuOps
from sapwood_server.model.attention import AttentionShape, StepAttention
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.decoder import Decoder
from sapwood_server.model.dense_kv import DenseKV
from sapwood_server.model.kv import BlockTables, PagedKV
from sapwood_server.model.linear import LinearForms
from sapwood_server.model.memory import KVPlan
from sapwood_server.model.placement import PlacedRow, place_rows
from sapwood_server.model.rope import rotary_table
from sapwood_server.model.sampler import Sampler
from sapwood_server.model.weights import ModelWeights
from sapwood_server.values.messages import EngineInfo
from sapwood_server.values.plan import Draw, SampleSpec, StepPlan, StepResult


@dataclass(frozen=True)
class Model:
    """A loaded model and the ops to run it with."""

    config: ModelConfig
    weights: ModelWeights
    ops: CpuOps
    forms: LinearForms
    """Of weights, that linears may take. All but plain ones need bf16."""
    num_tokens: int
    """Ids from here on are padding of the vocabulary, never drawn."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, of what linears take and give, and of KV pages."""
        return self.weights.embedding.dtype


class ModelRunner:
    """Model, KV pages, block tables and sampler of one engine."""

    def __init__(self, model: Model, kv_plan: KVPlan, info: EngineInfo) -> None:
        self.info = info
        config = model.config
        self._ops = model.ops
        self._shape = AttentionShape.of(config, model.weights)
        self._decoder = Decoder(config, model.weights, model.ops, model.forms)
        self._sampler = Sampler(config.vocab_size, torch.device("cpu"), model.num_tokens)
        self._kv = PagedKV(config, kv_plan.num_pages, kv_plan.page_size, model.dtype)
        self._tables = BlockTables(kv_plan.page_size)
        self._dense_kv = DenseKV(config, kv_plan.dense_bytes, info.max_model_len)
        self._cos_sin = rotary_table(config, info.max_model_len)

    def execute(self, plan: StepPlan) -> StepResult:
        """Drops what ended, copies pages, computes the rows, samples.

        ValueError for a plan that breaks its own rules (a page that does not exist, a table too short); KV pages may
        then hold part of the step.
        """
        with torch.inference_mode():
            started = time.perf_counter()
            self._sampler.drop(plan.ended_choices)
            placed = self._place(plan)
            logits, specs = self._sample_logits(placed)
            computed = time.perf_counter()
            sampled = self._sampler.sample(logits, specs) if specs else []
            return StepResult(
                samples=_by_plan(placed, sampled),
                forward_seconds=computed - started,
                sample_seconds=time.perf_counter() - computed,
            )

    def token_logits(self, plan: StepPlan) -> tuple[Tensor, ...]:
        """Executes the plan without sampling; the logits of every token, fp32 [num_tokens, vocab_size] per row.

        For measurements of the model itself, such as perplexity.
        """
        with torch.inference_mode():
            placed = self._place(plan)
            logits = self._decoder.logits(self._hidden_states(placed))
            parts = torch.split(logits, [len(item.row.token_ids) for item in placed])
            rows = sorted(zip(placed, parts, strict=True), key=lambda pair: pair[0].index)
            return tuple(part for _, part in rows)

    def kv_pages(self, page: int) -> Tensor:
        """What a page holds now, [num_layers, 2, num_kv_heads, page_size, head_dim]: to be read only."""
        return self._kv.pages[:, :, :, page]

    def finish_loading(self, seconds: float) -> None:
        """Notes how long it took until the first step can run."""
        self.info = msgspec.structs.replace(self.info, load_seconds=seconds)

    def _place(self, plan: StepPlan) -> list[PlacedRow]:
        """Everything that comes before the forward pass."""
        self._tables.release(plan.released)
        self._dense_kv.release(plan.released)
        self._kv.copy(plan.copies)
        return place_rows(plan, self._tables, self._kv, self._dense_kv)

    def _hidden_states(self, placed: Sequence[PlacedRow]) -> Tensor:
        """Every token of the placed rows through the decoder, its KV written: [num_tokens, hidden]."""
        token_ids = torch.tensor([token for item in placed for token in item.row.token_ids], dtype=torch.int64)
        attention = StepAttention(self._ops, self._shape, self._kv, self._cos_sin, placed)
        hidden = self._decoder.forward(token_ids, attention.attend)
        attention.finish()
        return hidden

    def _sample_logits(self, placed: Sequence[PlacedRow]) -> tuple[Tensor, list[SampleSpec]]:
        """Logits, one row for each sample, in the order of `placed`. The head runs once for each last token that is
        sampled from, however many samples that are."""
        specs = [spec for item in placed for spec in item.row.samples]
        if not placed:
            return torch.empty(0), specs
        hidden = self._hidden_states(placed)
        last_tokens, counts = [], []
        token = -1
        for item in placed:
            token += len(item.row.token_ids)
            if item.row.samples:
                last_tokens.append(token)
                counts.append(len(item.row.samples))
        if not specs:
            return torch.empty(0), specs
        logits = self._decoder.logits(hidden if len(last_tokens) == len(hidden) else hidden[last_tokens])
        if len(specs) > len(last_tokens):
            logits = logits.repeat_interleave(torch.tensor(counts), dim=0)
        return logits, specs


def _by_plan(placed: Sequence[PlacedRow], sampled: Sequence[Draw]) -> tuple[tuple[Draw, ...], ...]:
    """Samples, which are in the order of computing, in that of the plan."""
    samples: list[tuple[Draw, ...]] = [()] * len(placed)
    first = 0
    for item in placed:
        count = len(item.row.samples)
        samples[item.index] = tuple(sampled[first : first + count])
        first += count
    return tuple(samples)
