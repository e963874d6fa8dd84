"""A server whose engine computes by the Triton kernels, in the interpreter: the ids are those of the CPU's ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood_bench.server_process import sapwood_server
from sapwood_server.values.demo import DEMO_MODEL
from support.device_runners import FEW_HEADS, make_device_model
from support.scale import suite_scale

FLAGS = ("--dtype", "float32", "--max-batched-tokens", "16", "--max-num-seqs", "4", "--served-model-name", "m")
PROMPT = "The capital of France is the city of"
START_SECONDS = 600.0


def served(model: str, device: str, bodies: list[dict[str, Any]]) -> list[list[list[int]]]:
    """The ids of each choice of each completion."""
    flags = (*FLAGS, "--device", device, "--kv-memory", "256MiB")
    with sapwood_server(model, flags, timeout_seconds=START_SECONDS) as server:
        version = httpx.get(f"{server.base_url}/version").json()
        assert version["engine"]["device"] == device
        answers = [
            httpx.post(
                f"{server.base_url}/v1/completions",
                json={"model": "m", "prompt": PROMPT, "temperature": 0, "return_token_ids": True, **body},
                timeout=START_SECONDS,
            ).json()
            for body in bodies
        ]
    return [[choice["token_ids"] for choice in answer["choices"]] for answer in answers]


def test_a_tiny_model_cold_warm_and_with_choices(tmp_path: Path) -> None:
    model = str(make_device_model(tmp_path / "tiny", overrides=FEW_HEADS))
    bodies: list[dict[str, Any]] = [{"max_tokens": 3}, {"max_tokens": 3}, {"max_tokens": 3, "n": 2}]
    found = served(model, "interpreter", bodies)
    assert found == served(model, "cpu", bodies)
    assert found[0] == found[1], "cold and warm"
    assert [len(ids) for ids in found[2]] == [3, 3]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(suite_scale() < 1, reason="thirty layers take seconds a token in the interpreter")
def test_the_demo_model() -> None:
    bodies: list[dict[str, Any]] = [{"max_tokens": 5}]
    assert served(DEMO_MODEL, "interpreter", bodies) == served(DEMO_MODEL, "cpu", bodies)
