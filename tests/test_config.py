"""The configuration: its values are checked, its sizes read, its secrets kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from sapwood_server.config import ServerConfig, cublas_may_split, engine_environment, parse_bytes, triton_interprets
from sapwood_server.errors import StartupError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 2**30),
        ("1GiB", 2**30),
        ("1.5 gib", 3 * 2**29),
        ("512 MB", 512 * 10**6),
        ("7b", 7),
        ("1e6", 10**6),
        ("1TiB", 2**40),
        ("0.5 TB", 5 * 10**11),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert ServerConfig(kv_memory=text).kv_memory_bytes == size


@pytest.mark.parametrize("text", ["", "lots", "0", "-1GiB", "0.1", "1 GiB 2", "1Gbit", "1PiB", "nan", "inf", "1e999"])
def test_what_is_no_size_is_quoted(text: str) -> None:
    with pytest.raises(StartupError, match="accepted: a positive number") as caught:
        ServerConfig(kv_memory=text)
    assert repr(text) in str(caught.value)
    assert "TiB" in str(caught.value)


def test_a_context_without_room_for_a_prompt_and_an_answer_is_refused() -> None:
    with pytest.raises(StartupError, match="--max-model-len is 1; accepted: 2 to ") as caught:
        ServerConfig(max_model_len=1)
    assert "a token of a prompt and its answer" in str(caught.value)
    assert ServerConfig(max_model_len=2).max_model_len == 2


@pytest.mark.parametrize("name", ["", " ", "\n"])
def test_a_name_that_nobody_can_ask_for_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match="--served-model-name is empty"):
        ServerConfig(served_model_name=("good", name))


def test_no_text_of_a_configuration_holds_a_key() -> None:
    assert "a-secret" not in repr(ServerConfig(api_key=("a-secret",)))
    with pytest.raises(StartupError) as caught:
        ServerConfig(api_key=(" a-secret",))
    assert "a-secret" not in str(caught.value)


@pytest.mark.parametrize(("value", "interprets"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_triton_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch, value: str, interprets: bool) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert triton_interprets() is interprets
    knobs = pytest.importorskip("triton.knobs")
    assert knobs.runtime.interpret is interprets


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "interpreter"])
def test_an_engine_interprets_kernels_iff_its_device_is_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    environment = engine_environment(ServerConfig(device=device))
    assert environment.get("TRITON_INTERPRET") == ("1" if device == "interpreter" else None)
    assert environment["SOMETHING_ELSE"] == "kept"


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_engine_finds_no_workspace_to_split_products_in(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert cublas_may_split()
    environment = engine_environment(ServerConfig(deterministic=deterministic))
    assert environment.get("CUBLAS_WORKSPACE_CONFIG") == (":16:8" if deterministic else None)
    assert environment.get("CUBLASLT_WORKSPACE_SIZE") == ("1" if deterministic else None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cublas_may_split() is not deterministic


@pytest.mark.parametrize("name", ["LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
def test_an_engine_keeps_few_kernels_per_shape_unless_the_user_says_how_many(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert engine_environment(ServerConfig())[name] == "64"
    monkeypatch.setenv(name, "7")
    assert engine_environment(ServerConfig())[name] == "7"


_GROWTH_OF_MANY_SHAPES = """
import torch

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

torch.set_num_threads(1)
weights = [torch.randn(rows, 128).bfloat16() for rows in (128, 192)]
for num_rows in (512, *range(1, 100)):
    for weight in weights:
        torch.nn.functional.linear(torch.zeros(num_rows, 128, dtype=torch.bfloat16), weight)
    if num_rows == 512:
        before = resident()
print(resident() - before)
"""


def test_products_of_many_shapes_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps a megabyte for each number of rows of each matrix, a thousand of them in two caches."""

    def growth(environment: Mapping[str, str]) -> int:
        command = [sys.executable, "-c", _GROWTH_OF_MANY_SHAPES]
        done = subprocess.run(command, capture_output=True, check=True, env=dict(environment))
        return int(done.stdout)

    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    unbounded = growth(os.environ)
    if unbounded < 50_000:
        pytest.skip("this CPU's bfloat16 does not go through those caches")
    assert growth(engine_environment(ServerConfig())) < unbounded / 2
