"""From a configuration to a runner that is ready for its first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from sapwood_kernels.dispatch import cpu_ops
from sapwood_server.config import ServerConfig, onednn_isa_limit
from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import read_gguf_header
from sapwood_server.formats.model_files import ModelFiles, resolve_model
from sapwood_server.formats.vocabulary import Vocabulary, load_vocabulary
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.cpu_forward import CpuForward
from sapwood_server.model.dtype import DtypeChoice, choose_cpu_dtype, read_cpu_flags
from sapwood_server.model.fingerprint import model_fingerprint
from sapwood_server.model.gguf_source import num_packed_parameters
from sapwood_server.model.loaded_model import Model
from sapwood_server.model.memory import (
    MIN_SEQUENCE_TOKENS,
    KVPlan,
    available_memory,
    default_kv_memory,
    give_back_freed_memory,
    plan_kv,
)
from sapwood_server.model.runner import ModelRunner
from sapwood_server.model.sampler import Sampler
from sapwood_server.model.warm_up import warm_up
from sapwood_server.model.weight_plan import WeightPlan, num_parameters, plan_weights
from sapwood_server.model.weights import load_weights
from sapwood_server.values.messages import EngineInfo

_logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""(stage, fraction in [0, 1])."""

CPU_STEP_MULTIPLICATIONS = 50 * 10**9
"""What a step may multiply: a quarter of what two cores with AMX do in a second, half of what they do without it."""
MIN_BATCHED_TOKENS = 32
MAX_BATCHED_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """Everything decided before a weight is read."""

    files: ModelFiles
    config: ModelConfig
    dtype: DtypeChoice
    max_model_len: int
    max_batched_tokens: int
    max_num_seqs: int
    kv: KVPlan
    weights: WeightPlan


def load_runner(config: ServerConfig, progress: Progress, vocabulary: Vocabulary | None = None) -> ModelRunner:
    """Plans, loads the weights, warms up. StartupError, one line, for whatever keeps the model from running here.

    The vocabulary, which takes a second to read, may be handed in by a caller that has it.
    """
    started = time.perf_counter()
    plan = plan_load(config)
    _logger.info("dtype %s: %s", plan.dtype.name, plan.dtype.reason)
    _log_weights(plan)
    _logger.info(
        "KV: %d pages of %d tokens, %d MiB, and up to %d MiB for copies of sequences that decode",
        plan.kv.num_pages,
        plan.kv.page_size,
        plan.kv.num_bytes >> 20,
        plan.kv.dense_bytes >> 20,
    )
    if plan.kv.num_tokens < plan.max_model_len:
        _logger.warning(
            "the KV pool holds %d tokens, the context is %d: longer requests are refused (raise --kv-memory)",
            plan.kv.num_tokens,
            plan.max_model_len,
        )
    runner = make_runner(plan, load_model(plan, progress, vocabulary))
    if not give_back_freed_memory():
        _logger.info("without glibc's malloc_trim, memory that loading took may stay with the process")
    progress("warm-up", 0.0)
    warm_up(runner)
    progress("warm-up", 1.0)
    runner.finish_loading(time.perf_counter() - started)
    return runner


def plan_load(config: ServerConfig) -> LoadPlan:
    """Device, dtype, context and memory. StartupError for what can't be."""
    if config.device == "cuda":
        raise StartupError("--device is cuda, which is not implemented yet (accepted: auto, cpu)")
    files = resolve_model(config.model)
    model = load_model_config(files)
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise StartupError(
            f"--max-model-len is {max_model_len}, but the model's context is {model.max_position_embeddings} tokens"
        )
    model.check_context(max_model_len)
    dtype = choose_cpu_dtype(config.dtype, read_cpu_flags(), onednn_isa_limit())
    available = available_memory()
    num_q4 = num_packed_parameters(read_gguf_header(files.location)) if files.is_gguf else 0
    weights = plan_weights(model, dtype.dtype, num_q4, available)
    memory = config.kv_memory_bytes
    if memory is None:
        memory = default_kv_memory(available, weights.num_bytes)
    sequence_tokens = config.max_model_len or min(max_model_len, MIN_SEQUENCE_TOKENS)
    return LoadPlan(
        files=files,
        config=model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_batched_tokens=config.max_batched_tokens or default_max_batched_tokens(model),
        max_num_seqs=config.max_num_seqs,
        kv=plan_kv(model, dtype.dtype, config.page_size, sequence_tokens, memory),
        weights=weights,
    )


def default_max_batched_tokens(config: ModelConfig) -> int:
    """A power of two, such that a step takes under half a second on two cores: by the number of multiplications.

    Never under MIN_BATCHED_TOKENS, though with more than 1.5 billion parameters a step then takes longer: it reads all
    weights however few its tokens, which takes as long as the multiplications of some 20 tokens.
    """
    tokens = CPU_STEP_MULTIPLICATIONS // num_parameters(config)
    return max(MIN_BATCHED_TOKENS, min(MAX_BATCHED_TOKENS, 1 << max(0, tokens.bit_length() - 1)))


def load_model(plan: LoadPlan, progress: Progress, vocabulary: Vocabulary | None = None) -> Model:
    """Reads the weights, and the vocabulary unless it is handed in."""
    forms = plan.weights.forms
    weights = load_weights(
        plan.files, plan.config, plan.dtype.dtype, lambda share: progress("weights", share), keep_packed=forms.int4
    )
    if vocabulary is None:
        vocabulary = load_vocabulary(plan.files)
    return Model(plan.config, weights, forms, vocabulary.num_tokens)


def make_runner(plan: LoadPlan, model: Model) -> ModelRunner:
    """A runner that has not run yet."""
    forward = CpuForward(model, cpu_ops(), plan.kv, plan.max_model_len)
    return ModelRunner(forward, Sampler(plan.config.vocab_size, "cpu", model.num_tokens), engine_info(plan, model))


def engine_info(plan: LoadPlan, model: Model) -> EngineInfo:
    """What was decided, for whoever asks the engine."""
    return EngineInfo(
        model=plan.files.name,
        architecture=plan.config.architecture,
        fingerprint=model_fingerprint(plan.files, plan.config, model.weights, plan.kv.page_size),
        device="cpu",
        dtype=plan.dtype.name,
        dtype_reason=plan.dtype.reason,
        vocab_size=plan.config.vocab_size,
        max_model_len=plan.max_model_len,
        page_size=plan.kv.page_size,
        num_pages=plan.kv.num_pages,
        kv_bytes_per_token=plan.kv.bytes_per_token,
        max_batched_tokens=plan.max_batched_tokens,
        max_num_seqs=plan.max_num_seqs,
        weight_bytes=plan.weights.num_bytes,
        load_seconds=0.0,
    )


def _log_weights(plan: LoadPlan) -> None:
    """The forms of weights, why others are not taken, and what they cost."""
    weights = plan.weights
    for problem in weights.problems:
        _logger.warning("a form of weights is left out, which makes the model slower: %s", problem)
    _logger.info(
        "weights: %s, %d MiB, and %d MiB while they are made",
        weights.forms,
        weights.num_bytes >> 20,
        weights.peak_bytes >> 20,
    )
