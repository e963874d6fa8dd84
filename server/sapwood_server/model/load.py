"""From a configuration to a runner that is ready for its first step."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import Protocol, cast

from sapwood_kernels.dispatch import cpu_ops
from sapwood_server.config import ServerConfig
from sapwood_server.formats.vocabulary import Vocabulary, load_vocabulary
from sapwood_server.model.cpu_forward import CpuForward
from sapwood_server.model.devices import DeviceKind
from sapwood_server.model.fingerprint import model_fingerprint
from sapwood_server.model.load_plan import LoadPlan, plan_load
from sapwood_server.model.loaded_model import Model
from sapwood_server.model.memory import give_back_freed_memory
from sapwood_server.model.runner import ModelRunner
from sapwood_server.model.sampler import Sampler
from sapwood_server.model.self_check import check_deterministic_runner
from sapwood_server.model.warm_up import warm_up
from sapwood_server.model.weights import WeightPlacement, load_weights
from sapwood_server.values.messages import EngineInfo

_logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""(stage, fraction in [0, 1])."""

_DEVICE_RUNNER = "sapwood_server.model.device_runner"


class DeviceRunnerModule(Protocol):
    """What `load` calls in the module of the runner for GPUs."""

    def make_device_runner(self, plan: LoadPlan, model: Model, info: EngineInfo) -> ModelRunner: ...


def load_runner(config: ServerConfig, progress: Progress, vocabulary: Vocabulary | None = None) -> ModelRunner:
    """Plans, loads the weights, warms up. StartupError, one line, for whatever keeps the model from running here.

    The vocabulary, which takes a second to read, may be handed in by a caller that has it.
    """
    started = time.perf_counter()
    plan = plan_load(config)
    _logger.info("device %s (%s): %s", plan.device.kind.value, plan.device.detail, plan.device.reason)
    _logger.info("dtype %s: %s", plan.dtype.name, plan.dtype.reason)
    if plan.deterministic:
        _logger.info("deterministic: logits don't depend on chunks, batch mates, cache hits or preemption")
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
    runner.capture_graphs()
    if plan.deterministic:
        check_deterministic_runner(runner)
    progress("warm-up", 1.0)
    runner.finish_loading(time.perf_counter() - started)
    return runner


def load_model(plan: LoadPlan, progress: Progress, vocabulary: Vocabulary | None = None) -> Model:
    """Reads the weights, and the vocabulary unless it is handed in."""
    forms = plan.weights.forms
    placement = WeightPlacement(plan.dtype.dtype, plan.device.torch_device, keep_packed=forms.int4)
    weights = load_weights(plan.files, plan.config, placement, lambda share: progress("weights", share))
    if vocabulary is None:
        vocabulary = load_vocabulary(plan.files)
    return Model(plan.config, weights, forms, vocabulary.num_tokens)


def make_runner(plan: LoadPlan, model: Model) -> ModelRunner:
    """A runner that has not run yet."""
    info = engine_info(plan, model)
    if plan.device.kind is DeviceKind.CPU:
        forward = CpuForward(model, cpu_ops(deterministic=plan.deterministic), plan.kv, plan.max_model_len)
        return ModelRunner(forward, Sampler(plan.config.vocab_size, "cpu", model.num_tokens), info)
    # By name, so that triton, which that module needs, is imported only where kernels of it run: an installation for
    # CPUs has none.
    device_runner = cast(DeviceRunnerModule, importlib.import_module(_DEVICE_RUNNER))
    return device_runner.make_device_runner(plan, model, info)


def engine_info(plan: LoadPlan, model: Model) -> EngineInfo:
    """What was decided, for whoever asks the engine."""
    return EngineInfo(
        model=plan.files.name,
        architecture=plan.config.architecture,
        fingerprint=model_fingerprint(
            plan.files,
            plan.config,
            model.weights,
            plan.kv.page_size,
            plan.device.kind,
            deterministic=plan.deterministic,
        ),
        device=plan.device.kind.value,
        dtype=plan.dtype.name,
        dtype_reason=plan.dtype.reason,
        deterministic=plan.deterministic,
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
