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
from sapwood_server.model.memory import KVPlan
from sapwood_server.model.placement import PlacedRow, place_rows
from sapwood_server.model.rope import rotary_table
from sapwood_server.model.sampler import Sampler
from sapwood_server.model.weights import ModelWeights
from sapwood_server.values.messages import EngineInfo
from sapwood_server.values.plan import Sampled, SampleSpec, StepPlan, StepResult


@dataclass(frozen=True)
class Model:
    """A loaded model and the ops to run it with."""

    config: ModelConfig
    weights: ModelWeights
    ops: CpuOps
    packed: bool
    """Whether few rows take packed weights. Needs bf16."""
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
        self._decoder = Decoder(config, model.weights, model.ops, model.packed)
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
            self._tables.release(plan.released)
            self._dense_kv.release(plan.released)
            self._sampler.drop(plan.ended_choices)
            self._kv.copy(plan.copies)
            placed = place_rows(plan, self._tables, self._kv, self._dense_kv)
            logits, specs = self._compute(placed)
            computed = time.perf_counter()
            sampled = self._sampler.sample(logits, specs) if specs else []
            return StepResult(
                samples=_by_plan(placed, sampled),
                forward_seconds=computed - started,
                sample_seconds=time.perf_counter() - computed,
            )

    def finish_loading(self, seconds: float) -> None:
        """Notes how long it took until the first step can run."""
        self.info = msgspec.structs.replace(self.info, load_seconds=seconds)

    def hidden_states(self, placed: Sequence[PlacedRow]) -> Tensor:
        """Every token of the placed rows through the decoder, its KV written: [num_tokens, hidden]."""
        token_ids = torch.tensor([token for item in placed for token in item.row.token_ids], dtype=torch.int64)
        attention = StepAttention(self._ops, self._shape, self._kv, self._cos_sin, placed)
        hidden = self._decoder.forward(token_ids, attention.attend)
        attention.finish()
        return hidden

    def _compute(self, placed: Sequence[PlacedRow]) -> tuple[Tensor, list[SampleSpec]]:
        """Logits, one row for each sample, in the order of `placed`."""
        specs = [spec for item in placed for spec in item.row.samples]
        if not placed:
            return torch.empty(0), specs
        hidden = self.hidden_states(placed)
        last, rows = -1, []
        for item in placed:
            last += len(item.row.token_ids)
            rows.extend([last] * len(item.row.samples))
        if not rows:
            return torch.empty(0), specs
        unique = sorted(set(rows))
        logits = self._decoder.logits(hidden[unique] if len(unique) < len(hidden) else hidden)
        if len(unique) < len(rows):
            logits = logits[torch.tensor([unique.index(row) for row in rows])]
        return logits, specs


def _by_plan(placed: Sequence[PlacedRow], sampled: Sequence[Sampled]) -> tuple[tuple[Sampled, ...], ...]:
    """Samples, which are in the order of computing, in that of the plan."""
    samples: list[tuple[Sampled, ...]] = [()] * len(placed)
    first = 0
    for item in placed:
        count = len(item.row.samples)
        samples[item.index] = tuple(sampled[first : first + count])
        first += count
    return tuple(samples)
