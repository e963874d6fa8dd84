"""Steps of a run, dry: tiny cases in Triton's interpreter."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from triton.runtime.errors import OutOfResources

from sapwood_bench.kernels import checks, steps, workers
from sapwood_bench.kernels.checks import CHECKS, CheckStep
from sapwood_bench.kernels.device import Device, NoDeviceError, measured_device
from sapwood_bench.kernels.model_step import LLAMA_8B, chunk_flops, matrix_parameters, step_bytes
from sapwood_bench.kernels.results import Check, Row, StepResult, read_steps
from sapwood_bench.kernels.steps import RunOptions, run_step
from sapwood_bench.kernels.workers import Outcome, Parts
from sapwood_kernels.config_table import config_rows
from sapwood_server.errors import StartupError
from support.scale import suite_scale


@pytest.fixture(name="options")
def dry_options() -> RunOptions:
    return RunOptions(device=measured_device(dry=True), seconds=60.0, quick=True)


def test_nothing_is_measured_while_kernels_are_interpreted() -> None:
    with pytest.raises(NoDeviceError, match="TRITON_INTERPRET"):
        measured_device(dry=False)


def test_versions_and_ceilings(options: RunOptions) -> None:
    versions = run_step("versions", options)
    assert {"gpu", "torch", "triton", "numpy", "python", "commit"} <= set(versions.machine)
    assert versions.dry
    found = run_step("ceilings", options)
    assert not found.failed
    assert found.ceilings is not None
    assert found.ceilings.copy_tb_s > 0


def test_every_pointwise_op_is_right_and_timed(options: RunOptions) -> None:
    found = run_step("pointwise", options)
    assert found.problems == ()
    assert [check.problem for check in found.checks] == [""] * 5
    assert [row.name.partition(",")[0] for row in found.rows] == [
        "rope_kv_store",
        "add_rms_norm",
        "silu_mul",
        "logits_prepare",
        "sample",
    ]


def test_the_model_is_stepped(options: RunOptions) -> None:
    found = run_step("model", options)
    assert found.problems == ()
    names = [row.name for row in found.rows]
    assert names[:2] == ["decode step, 1 x 16, graph", "decode step, 2 x 16, graph"]
    assert "prefill step, 16 tokens" in names


def test_what_the_8b_model_must_read_and_compute() -> None:
    """8.03e9 parameters, of which an embedding of 128,256 x 4,096 is only looked up, and norms."""
    assert matrix_parameters(LLAMA_8B) == 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert step_bytes(LLAMA_8B, 3, 1000) == 2 * matrix_parameters(LLAMA_8B) + 3 * 1001 * 131_072
    head = 128_256 * 4096
    attention = 32 * 4 * 32 * 128 * 2001000
    assert chunk_flops(LLAMA_8B, 2000) == 2 * ((matrix_parameters(LLAMA_8B) - head) * 2000 + head) + attention


RESOURCES = OutOfResources(300_000, 232_448, "shared memory")
"""What a tile that is too large gives on a GPU."""


def fails(error: Exception) -> Callable[[], Iterator[Row | Check]]:
    def task() -> Iterator[Row | Check]:
        yield Check(name="came first")
        raise error

    return task


def test_an_error_ends_its_task_and_time_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 30.0])
    monkeypatch.setattr("sapwood_bench.kernels.steps.time.monotonic", lambda: next(clock))

    def fine() -> Iterator[Row | Check]:
        yield Row(table="decode", name="fine", us=1.0, num_bytes=1)

    tasks = {"bad": fails(RESOURCES), "good": fine, "worse": fails(StartupError("no")), "late": fine}
    saved: list[StepResult] = []
    found = steps.run_tasks(tasks, StepResult(step="decode"), 10.0, saved.append)
    assert found.problems == (f"bad: OutOfResources: {RESOURCES}", "worse: StartupError: no")
    assert [row.name for row in found.rows] == ["fine"]
    assert [check.name for check in found.checks] == ["came first", "came first"]
    assert found.left_out == ("late: out of time",)
    assert found.failed
    assert [each.problems[-1] for each in saved] == ["in progress: bad", "in progress: good", "in progress: worse"]
    counts = [(len(each.rows), len(each.checks), len(each.problems)) for each in saved]
    assert counts == [
        (0, 0, 1),
        (0, 1, 2),
        (1, 1, 2),
    ]


def test_parts_of_a_check_step_fail_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(name: str, device: Device) -> list[Check]:
        if name == "bad":
            raise RESOURCES
        return [Check(name=name)]

    monkeypatch.setitem(CHECKS, "identity", CheckStep(lambda dry: ["a", "bad", "b"], check))
    saved: list[Outcome] = []
    parts = Parts("identity", ["a", "bad", "b"], dry=True, save=saved.append)
    found = workers.run_apart(parts, workers=1, deadline=time.monotonic() + 60)
    assert [each.name for each in found.checks] == ["a", "b"]
    assert found.problems == (f"bad: OutOfResources: {RESOURCES}",)
    assert [each.problems[-1] for each in saved] == ["in progress: a", "in progress: bad", "in progress: b"]
    assert [len(each.checks) for each in saved] == [0, 1, 1]
    late = workers.run_apart(Parts("identity", ["a"], dry=True), workers=1, deadline=time.monotonic() - 1)
    assert late.left_out == ("a: out of time",)


def test_another_error_of_a_process_is_its_parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With threads in place of processes, whose parts can't be replaced."""

    def check(name: str, device: Device) -> list[Check]:
        if name == "bad":
            raise KeyError("mistake")
        return [Check(name=name)]

    monkeypatch.setitem(CHECKS, "identity", CheckStep(lambda dry: ["a", "bad", "b"], check))
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda max_workers, mp_context: ThreadPoolExecutor(max_workers))
    saved: list[Outcome] = []
    parts = Parts("identity", ["a", "bad", "b"], dry=True, save=saved.append)
    found = workers.run_apart(parts, workers=2, deadline=time.monotonic() + 60)
    assert sorted(saved[0].problems[0].removeprefix("in progress: ").split("; ")) == ["a", "b", "bad"]
    assert sorted(each.name for each in found.checks) == ["a", "b"]
    assert found.problems == ("bad: KeyError: 'mistake'",)


def test_a_check_step_without_parts_has_failed(monkeypatch: pytest.MonkeyPatch, options: RunOptions) -> None:
    def names(dry: bool) -> list[str]:
        raise ValueError("no attention config for compute capability 75")

    monkeypatch.setitem(CHECKS, "repeat", CheckStep(names, lambda name, device: []))
    found = run_step("repeat", options)
    assert found.problems == ("ValueError: no attention config for compute capability 75",)


@pytest.mark.parametrize(("arch", "stand_in"), [(90, 90), (100, 90), (120, 89)])
def test_launches_are_repeated_on_a_device_that_runs_anothers_rows(
    monkeypatch: pytest.MonkeyPatch, arch: int, stand_in: int
) -> None:
    monkeypatch.setattr(checks, "device_arch", lambda device: arch)
    rows = [row for row in config_rows() if row.arch == stand_in]
    names = CHECKS["repeat"].names(False)
    assert {name.partition(",")[0] for name in names} == {"prefill", "decode"}
    wanted = {(row.phase.value, str(row.dtypes[0]), row.head_dims[-1], row.groups[-1]) for row in rows}
    assert len(names) == len(wanted)


@pytest.mark.skipif(suite_scale() < 1, reason="starts two more processes with torch: at full scale only")
def test_processes_of_their_own() -> None:
    """Two of them, on real parts."""
    names = ["logits_prepare's edits, bitwise", "rope_kv_store with head norms into e4m3"]
    found = workers.run_apart(Parts("ops", names, dry=True), workers=2, deadline=time.monotonic() + 200)
    assert found.problems == ()
    assert sorted(check.name for check in found.checks) == names


_ENDED = """
import os, signal, sys
from sapwood_bench.kernels import steps
from sapwood_bench.kernels.__main__ import main
from sapwood_bench.kernels.results import Row
def fine():
    yield Row(table="decode", name="fine", us=1.0, num_bytes=1)
def ended():
    os.kill(os.getpid(), signal.SIGTERM)
    yield from ()
tasks = {"fine": fine, "ended": ended}
steps.STEPS["decode"] = lambda options, found, deadline: steps.run_tasks(tasks, found, deadline, options.save)
main(["--out", sys.argv[1], "--dry-run", "--step", "decode"])
"""


def test_a_step_that_is_ended_has_left_what_it_found(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _ENDED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    (found,) = read_steps(tmp_path, ["decode"])
    assert [row.name for row in found.rows] == ["fine"]
    assert found.problems == ("in progress: ended",)
    assert [path.name for path in tmp_path.iterdir()] == ["decode.json"]


_WITHOUT = """
import sys
for name in ("msgspec", "gguf", "typer", "rich", "transformers", "tokenizers", "fastapi", "zmq", "jinja2"):
    sys.modules[name] = None
from sapwood_bench.kernels.__main__ import main
sys.exit(main(["--out", sys.argv[1], "--dry-run", "--step", "versions", "--step", "model"]))
"""


def test_a_machine_with_torch_and_triton_alone_runs_all_but_the_model(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    versions, model = read_steps(tmp_path, ["versions", "model"])
    assert not versions.failed
    assert "SKIPPED, the runner needs a package that is not installed" in model.problems[0]
