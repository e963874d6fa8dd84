"""From a configuration to a runner, or to one line that says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sapwood_server.config import ServerConfig
from sapwood_server.errors import StartupError
from sapwood_server.model.config_json import config_from_json
from sapwood_server.model.devices import DeviceKind
from sapwood_server.model.load import load_runner
from sapwood_server.model.load_plan import (
    GPU_MAX_BATCHED_TOKENS,
    GPU_MIN_BATCHED_TOKENS,
    INTERPRETER_BATCHED_TOKENS,
    MAX_BATCHED_TOKENS,
    MIN_BATCHED_TOKENS,
    default_max_batched_tokens,
    plan_load,
)
from support.stepping import Driver, make_config, make_runner
from support.tiny_models import make_tiny_model, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("load") / "model", "qwen3")


def test_a_runner_says_what_was_decided(folder: Path) -> None:
    stages: list[tuple[str, float]] = []
    config = ServerConfig(
        model=str(folder), dtype="bfloat16", max_model_len=200, page_size=32, kv_memory="1MiB", max_num_seqs=5
    )
    runner = load_runner(config, lambda stage, fraction: stages.append((stage, fraction)))
    info = runner.info
    assert (info.model, info.architecture, info.device) == ("model", "qwen3", "cpu")
    assert (info.dtype, info.dtype_reason) == ("bfloat16", "--dtype asks for it")
    assert (info.max_model_len, info.page_size, info.vocab_size, info.max_num_seqs) == (200, 32, 320, 5)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 2 * 16
    assert info.num_pages == 2**20 // (32 * info.kv_bytes_per_token)
    assert info.max_batched_tokens == MAX_BATCHED_TOKENS
    assert info.load_seconds > 0
    assert [stage for stage, fraction in stages if fraction == 1.0] == ["weights", "warm-up"]
    assert all(0 <= fraction <= 1 for _, fraction in stages)


def test_no_more_sequences_are_planned_for_than_a_step_has_tokens(folder: Path) -> None:
    config = ServerConfig(model=str(folder), max_num_seqs=64, max_batched_tokens=8, kv_memory="1MiB")
    assert plan_load(config).max_num_seqs == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_deterministic_plans(folder: Path, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    """One form of weights for every number of rows, no copies to decode from, and it is said."""
    config = make_config(folder, dtype, deterministic=True)
    plan = plan_load(config)
    assert plan.deterministic
    assert plan.weights.forms.fixed_rows
    assert not plan.weights.forms.int4
    assert plan.kv.dense_bytes == 0
    with caplog.at_level("INFO"):
        assert load_runner(config, lambda stage, fraction: None).info.deterministic
    assert "deterministic: logits don't depend on chunks" in caplog.text
    usual = plan_load(make_config(folder, dtype))
    assert not usual.deterministic
    assert not usual.weights.forms.fixed_rows
    assert usual.kv.dense_bytes > 0


def test_warming_up_leaves_nothing_behind(folder: Path) -> None:
    """The reserved page is zero, and answers are those of a runner that was not warmed up."""
    warm = load_runner(make_config(folder), lambda stage, fraction: None)
    assert not warm.kv_pages(0).any()
    cold = make_runner(make_config(folder))
    assert Driver(warm).generate([9, 8, 7], 10, 64) == Driver(cold).generate([9, 8, 7], 10, 64)


@pytest.mark.parametrize("max_model_len", [2, 17])
def test_the_smallest_contexts_start(folder: Path, max_model_len: int) -> None:
    config = ServerConfig(model=str(folder), max_model_len=max_model_len, kv_memory="64KiB")
    assert load_runner(config, lambda stage, fraction: None).info.max_model_len == max_model_len


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "--device is cuda, but "),
        ({"device": "interpreter"}, "the model can't run on --device interpreter: no attention config"),
        ({"max_model_len": 513}, "--max-model-len is 513, but the model's context is 512 tokens"),
        (
            {"kv_memory": "200KiB", "max_model_len": 512},
            "KV memory is 204800 bytes, but one sequence of 512 tokens needs 270336 bytes",
        ),
        ({"kv_memory": "64KiB"}, "KV memory is 65536 bytes, but one sequence of 256 tokens needs 139264 bytes"),
    ],
)
def test_what_keeps_a_server_from_starting_is_one_line(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as raised:
        load_runner(ServerConfig(model=str(folder), dtype="float32", **options), lambda stage, fraction: None)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_pool_below_the_models_own_context_is_said_not_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(model=str(folder), dtype="float32", kv_memory="200KiB")
    info = load_runner(config, lambda stage, fraction: None).info
    pool = (info.num_pages - 1) * info.page_size
    assert 256 <= pool < info.max_model_len == 512
    assert f"the KV pool holds {pool} tokens, the context is 512" in caplog.text


def test_a_sequence_may_fill_a_pool_that_is_smaller_than_the_context(folder: Path) -> None:
    """The rotary table is no longer than the pool."""
    small, large = (make_runner(make_config(folder, kv_memory=memory)) for memory in ("200KiB", "64MiB"))
    num_tokens = (small.info.num_pages - 1) * small.info.page_size
    assert num_tokens < small.info.max_model_len
    token_ids = [3 + 7 * position % 250 for position in range(num_tokens)]
    found, wanted = (Driver(runner).teacher_forced(token_ids, num_tokens) for runner in (small, large))
    assert torch.equal(found, wanted)


def test_a_window_that_would_hide_tokens_is_refused(tmp_path: Path) -> None:
    windowed = make_tiny_model(tmp_path / "model", "mistral", overrides={"sliding_window": 100})
    with pytest.raises(StartupError, match="sliding_window is 100"):
        plan_load(ServerConfig(model=str(windowed)))
    assert plan_load(ServerConfig(model=str(windowed), max_model_len=100)).max_model_len == 100


def test_a_gpus_steps_are_larger_and_shrink_as_well() -> None:
    """The 8B shape of Llama 3.1 gets 8,192 tokens, the 70B shape 512; the interpreter a handful."""
    sizes = {"8B": (4096, 14336, 32), "70B": (8192, 28672, 80)}
    steps = {}
    for name, (hidden, intermediate, layers) in sizes.items():
        document: dict[str, Any] = tiny_config("llama", 128256, 8192)
        document |= {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        document |= {"num_attention_heads": hidden // 128, "num_key_value_heads": 8, "head_dim": 128}
        config = config_from_json(document, Path("config.json"))
        steps[name] = default_max_batched_tokens(config, DeviceKind.CUDA)
        assert default_max_batched_tokens(config, DeviceKind.INTERPRETER) == INTERPRETER_BATCHED_TOKENS
    assert steps == {"8B": GPU_MAX_BATCHED_TOKENS, "70B": GPU_MIN_BATCHED_TOKENS}


def test_the_step_shrinks_as_the_model_grows() -> None:
    """In powers of two, between the bounds; the embedded model's is 256."""
    sizes = {
        "small": (576, 1536, 30, 49152),
        "large": (4096, 14336, 32, 128256),
    }
    steps = {}
    for name, (hidden, intermediate, layers, vocab) in sizes.items():
        document: dict[str, Any] = tiny_config("llama", vocab, 8192)
        document |= {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        document |= {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 192, "head_dim": 64}
        document |= {"tie_word_embeddings": True}
        if hidden == 4096:
            document |= {"num_key_value_heads": 8}
        steps[name] = default_max_batched_tokens(config_from_json(document, Path("config.json")))
    assert steps == {"small": 256, "large": MIN_BATCHED_TOKENS}
