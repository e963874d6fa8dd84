"""The report that `sapwood doctor` shows, made without loading a weight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from sapwood_server.config import ServerConfig
from sapwood_server.model.report import compute_report
from sapwood_server.values.report import ComputeReport
from support.stepping import make_config, make_runner
from support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("report") / "model", "llama")


def test_it_tells_what_a_start_would_decide(folder: Path) -> None:
    config = make_config(folder)
    report, info = compute_report(config), make_runner(config).info
    assert report.problem is None
    assert (report.device, report.dtype, report.dtype_reason) == ("cpu", info.dtype, info.dtype_reason)
    assert (report.architecture, report.max_model_len) == ("llama", info.max_model_len)
    assert (report.weight_bytes, report.kv_bytes_per_token) == (info.weight_bytes, info.kv_bytes_per_token)
    assert report.kv_tokens == (info.num_pages - 1) * info.page_size
    assert "threads" in report.device_detail


def test_a_start_that_would_fail_is_a_problem(folder: Path) -> None:
    report = compute_report(ServerConfig(model=str(folder), max_model_len=1000))
    assert report.problem == "--max-model-len is 1000, but the model's context is 512 tokens"
    assert report.weight_bytes is None


def test_a_device_that_is_not_there_is_a_problem(folder: Path) -> None:
    report = compute_report(ServerConfig(model=str(folder), device="cuda"))
    assert report.device == "cuda"
    assert report.problem is not None
    assert report.problem.startswith("--device is cuda, but ")


def test_the_interpreters_plan(tmp_path: Path) -> None:
    """No copies of sequences that decode, no packed weights."""
    folder = make_tiny_model(tmp_path / "model", overrides={"head_dim": 64})
    report = compute_report(ServerConfig(model=str(folder), device="interpreter", kv_memory="1MiB"))
    assert report.problem is None
    assert (report.device, report.dtype, report.packed) == ("interpreter", "float32", "no: a CPU's form")
    assert "threads" in report.device_detail


def test_deterministic_leaves_packed_weights_out(folder: Path) -> None:
    report = compute_report(make_config(folder, "bfloat16", deterministic=True))
    assert report.packed == "no: --deterministic takes one form of weights for every number of rows"


def test_as_a_command(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sapwood_server.model.report"],
        input=msgspec.json.encode(make_config(folder)),
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert msgspec.json.decode(done.stdout, type=ComputeReport) == compute_report(make_config(folder))
