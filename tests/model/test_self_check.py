"""What is tried at a start with `--deterministic`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sapwood_server.errors import StartupError
from sapwood_server.model import load
from sapwood_server.model.linear import PLAIN_FORMS
from sapwood_server.model.load_plan import plan_load
from sapwood_server.model.self_check import check_deterministic_runner, check_pages
from support.stepping import Driver, make_config, make_runner
from support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("self_check") / "model", "qwen3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_start_passes_and_leaves_nothing_behind(folder: Path, dtype: str) -> None:
    config = make_config(folder, dtype, deterministic=True)
    runner = load.load_runner(config, lambda stage, fraction: None)
    assert runner.info.deterministic
    fresh = make_runner(config)
    assert Driver(runner).generate([9, 8, 7], 10, 64) == Driver(fresh).generate([9, 8, 7], 10, 64)


@pytest.mark.parametrize("max_model_len", [2, 17, 21])
def test_the_smallest_contexts_pass(folder: Path, max_model_len: int) -> None:
    config = dataclasses.replace(
        make_config(folder, deterministic=True, kv_memory="64KiB"), max_model_len=max_model_len, max_batched_tokens=5
    )
    check_deterministic_runner(make_runner(config))


def test_a_machine_that_does_not_hold_to_it_is_refused(folder: Path) -> None:
    """As this one is with products of as many rows as there are tokens."""
    plan = plan_load(make_config(folder, deterministic=True))
    plan = dataclasses.replace(plan, weights=dataclasses.replace(plan.weights, forms=PLAIN_FORMS))
    runner = load.make_runner(plan, load.load_model(plan, lambda stage, fraction: None))
    with pytest.raises(StartupError, match="logits depend on how a prompt is chunked") as raised:
        check_deterministic_runner(runner)
    assert "\n" not in str(raised.value)
    with pytest.raises(StartupError, match="20 tokens in chunks of 1, 3 and the rest gave other bits"):
        check_deterministic_runner(runner)
    with pytest.raises(StartupError, match="64 tokens in chunks of 1, 17 and the rest gave other bits"):
        check_pages(runner, (1, 17))


@pytest.mark.parametrize("kv_memory", ["64MiB", "52KiB"])
def test_pages_of_a_whole_step_are_compared(folder: Path, kv_memory: str) -> None:
    """What a GPU's start does, here on the CPU; of fewer tokens where the pool has no room for two such steps."""
    config = make_config(folder, deterministic=True, kv_memory=kv_memory)
    check_pages(make_runner(dataclasses.replace(config, max_model_len=70)), (1, 3, 17))
