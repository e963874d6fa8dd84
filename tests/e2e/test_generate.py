"""`sapwood generate`, as a person runs it: a process of its own with a real engine below it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.tiny_models import make_tiny_model


@pytest.fixture(name="model", scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", max_position_embeddings=64)


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sapwood_server", "generate", *arguments, "--kv-memory", "4MiB"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def answer(*arguments: str) -> dict[str, Any]:
    done = generate(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_the_answer_and_nothing_else_goes_to_stdout(model: Path) -> None:
    streamed = generate(str(model), "hello world", "--max-tokens", "5")
    assert streamed.returncode == 0, streamed.stderr
    whole = answer(str(model), "hello world", "--max-tokens", "5")
    assert streamed.stdout == whole["text"] + "\n"
    assert whole["usage"]["completion_tokens"] <= 5
    assert whole["finish_reason"] in ("stop", "length")
    raw = answer(str(model), "hello world", "--max-tokens", "1", "--raw")
    assert raw["usage"]["prompt_tokens"] < whole["usage"]["prompt_tokens"], "without the template's own tokens"


@pytest.mark.parametrize(
    ("prompt", "flags", "message"),
    [
        ("", ("--raw",), "PROMPT is ''; accepted: a text of at least one token"),
        ("word " * 100, (), "accepted: fewer than the context's 64"),
        ("hello", ("--max-model-len", "100000"), "--max-model-len is 100000"),
    ],
)
def test_what_cannot_be_answered_is_one_line(model: Path, prompt: str, flags: tuple[str, ...], message: str) -> None:
    done = generate(str(model), prompt, *flags)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sapwood: ")
    assert message in last
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = generate(str(tmp_path / "absent"), "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("sapwood: no such model: ")
    assert len(done.stderr.splitlines()) == 1
