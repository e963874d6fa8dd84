"""Runners by the Triton kernels in Triton's interpreter, for models whose heads the kernels take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sapwood_server.config import ServerConfig
from sapwood_server.model import load
from sapwood_server.model.cuda_graphs import DecodeGraphs, Run, decode_buckets
from sapwood_server.model.device_runner import assemble, make_limits, make_setup
from sapwood_server.model.load_plan import plan_load
from sapwood_server.model.runner import ModelRunner
from support.stepping import make_config
from support.tiny_models import make_tiny_model

HEAD_DIM = 64
"""The smallest that kernels were made for."""
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""For models whose heads are not what is tested: the interpreter takes longer for more of them."""


def make_device_model(path: Path, architecture: str = "llama", overrides: Mapping[str, Any] | None = None) -> Path:
    """A tiny model with heads of HEAD_DIM."""
    return make_tiny_model(path, architecture, overrides={"head_dim": HEAD_DIM, **(overrides or {})})


def device_config(folder: Path, **options: Any) -> ServerConfig:
    """A configuration for the interpreter with a small pool."""
    return dataclasses.replace(make_config(folder, kv_memory="4MiB"), device="interpreter", **options)


def make_device_runner(folder: Path, *, graphs: bool = False, **options: Any) -> ModelRunner:
    """A runner without warm-up. With `graphs`, decode steps are padded and replayed as on a GPU, though a replay here
    runs the step anew."""
    plan = plan_load(device_config(folder, **options))
    model = load.load_model(plan, lambda stage, fraction: None)
    if not graphs:
        return load.make_runner(plan, model)
    limits = make_limits(plan)
    setup = make_setup(model, plan.device, limits, deterministic=plan.deterministic)
    setup = dataclasses.replace(setup, graphs=DecodeGraphs(decode_buckets(limits.max_rows), run_again))
    return assemble(model, setup, load.engine_info(plan, model))


def run_again(run: Run) -> Run:
    """A capture that records nothing: what it returns is the run itself."""
    run()
    return run
