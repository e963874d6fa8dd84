"""Results as JSON and back, the targets, and the report made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sapwood_bench.kernels import report
from sapwood_bench.kernels.checks import CHECKS
from sapwood_bench.kernels.results import (
    CHECKED,
    ORDER,
    Ceilings,
    Check,
    Failure,
    Rival,
    Row,
    StepResult,
    as_rivals,
    read_ceilings,
    read_steps,
    write_step,
)
from sapwood_bench.kernels.steps import STEPS
from sapwood_bench.kernels.table import as_json, as_table, is_good
from sapwood_bench.kernels.targets import PREFILL_CASE, SHARED_CASE, STEP_CASE, UNGROUPED, judge

CEILINGS = Ceilings(copy_tb_s=4.0, mm_tf_s=800.0)


def row(table: str, name: str, us: float, **fields: object) -> Row:
    return Row(table=table, name=name, us=us, **{"num_bytes": 0, **fields})  # type: ignore[arg-type]


def good_run(decode_us: float = 300.0) -> list[StepResult]:
    """Every target met, decode by 0.89 of 4 TB/s."""
    gigabyte = 2**30
    sdpa = (Rival(name="sdpa flash", us=90.0), Rival(name="gather + sdpa flash", us=10.0), Rival(name="sdpa cudnn"))
    rows = {
        "decode": [row("decode", "decode 64 x 4k", decode_us, num_bytes=gigabyte, kv_bytes=gigabyte)],
        "prefill": [row("prefill", PREFILL_CASE, 100.0, flops=50 * 10**9, num_bytes=1, rivals=sdpa)],
        "shared": [
            row("shared", SHARED_CASE, 10.0, rivals=(Rival(name=UNGROUPED, us=85.0),)),
            row("shared", "other", 10.0, rivals=(Rival(name=UNGROUPED, us=9.8),)),
        ],
        "model": [row("model", STEP_CASE, 5000.0, num_bytes=17 * 10**9)],
    }
    machine: dict[str, str | int] = {"gpu": "some GPU", "commit": "abc"}
    return [
        StepResult(
            step=step,
            machine=machine,
            ceilings=CEILINGS if step == "ceilings" else None,
            rows=tuple(rows.get(step, ())),
            checks=(Check(name="right"),) if step in CHECKED else (),
        )
        for step in ORDER
    ]


def verdicts(steps: list[StepResult]) -> dict[str, str]:
    return {target.name.partition(":")[0]: target.verdict for target in judge(steps)}


def test_every_step_has_its_place() -> None:
    assert tuple(STEPS) == ORDER
    assert {*CHECKS, "bits"} == set(CHECKED)


def test_a_result_reads_back(tmp_path: Path) -> None:
    written = StepResult(
        step="decode",
        seconds=3.5,
        machine={"gpu": "some GPU", "multiprocessors": 132},
        problems=("a problem",),
        left_out=("a case: out of time",),
        checks=(Check(name="one"), Check(name="two", problem="wrong")),
        rows=(row("decode", "case", 12.5, num_bytes=8, rivals=(Rival(name="sdpa flash", note="n/a"),)),),
    )
    write_step(written, tmp_path)
    write_step(StepResult(step="ceilings", ceilings=CEILINGS), tmp_path)
    assert read_steps(tmp_path, ["decode"]) == [written]
    assert read_ceilings(tmp_path) == CEILINGS


@pytest.mark.parametrize("step", [*CHECKED, "decode"])
def test_what_was_not_checked_does_not_hold(step: str) -> None:
    left_out = StepResult(step=step, checks=(Check(name="one"),), left_out=("two: out of time",))
    assert left_out.failed
    assert "FAILED: two: out of time" in as_table([left_out])
    nothing = StepResult(step=step)
    assert nothing.failed == (step in CHECKED)
    assert ("FAILED: it checked nothing" in as_table([nothing])) == (step in CHECKED)
    assert not StepResult(step=step, checks=(Check(name="one"),)).failed


def test_a_step_that_left_nothing_has_failed(tmp_path: Path) -> None:
    (step,) = read_steps(tmp_path, ["model"])
    assert step.failed
    assert "left no result" in step.problems[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": "decode", "surplus": 1}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "decode.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"decode\.json is no step's result"):
        read_steps(tmp_path, ["decode"])


def test_figures_of_a_row() -> None:
    timed = row("decode", "case", 200.0, num_bytes=800 * 10**6, flops=10**9)
    assert timed.tb_s() == pytest.approx(4.0)
    assert timed.tf_s() == pytest.approx(5.0)


def test_rivals_are_compared_by_their_kind() -> None:
    timed = good_run()[ORDER.index("prefill")].rows[0]
    assert timed.times_faster() == pytest.approx(0.1)
    assert timed.times_faster("sdpa ") == pytest.approx(0.9)
    assert timed.times_faster("flex") is None


def test_failures_become_notes() -> None:
    assert as_rivals({"a": 2.0, "b": Failure("why")}) == (Rival(name="a", us=2.0), Rival(name="b", note="why"))


def test_all_targets_met() -> None:
    assert set(verdicts(good_run()).values()) == {"met"}
    assert is_good(good_run())


def test_a_missed_target_says_so() -> None:
    steps = good_run(decode_us=320.0)  # 0.839 of the copy
    assert verdicts(steps)["decode 64 x 4k"] == "MISSED"
    assert not is_good(steps)
    assert "target decode 64 x 4k: share of copy: 0.839 (>= 0.85): MISSED" in as_table(steps)


def test_decode_under_256_mib_has_no_target() -> None:
    steps = good_run()
    small = row("decode", "small", 10**6, num_bytes=1, kv_bytes=2**28 - 1)
    steps[ORDER.index("decode")] = StepResult(step="decode", rows=(*steps[ORDER.index("decode")].rows, small))
    assert "small" not in verdicts(steps)


def test_a_worse_shared_case_misses_its_target() -> None:
    steps = good_run()
    slow = row("shared", "slow", 10.0, rivals=(Rival(name=UNGROUPED, us=9.6),))
    steps[ORDER.index("shared")] = StepResult(step="shared", rows=(slow,))
    assert verdicts(steps)["worst shared case"] == "MISSED"
    assert verdicts(steps)[SHARED_CASE] == "not measured"


def test_what_was_not_measured_is_not_met() -> None:
    nothing = [StepResult(step=step) for step in ORDER]
    assert set(verdicts(nothing).values()) == {"not measured"}
    assert not is_good(nothing)


@pytest.mark.parametrize("table", ["decode", "prefill", "shared", "model"])
def test_chosen_steps_are_judged_by_their_own_targets(table: str) -> None:
    chosen = [step for step in good_run() if step.step in ("ceilings", table)]
    assert judge(chosen) == [target for target in judge(good_run()) if target in judge(chosen)]
    assert {target.verdict for target in judge(chosen)} == {"met"}
    assert is_good(chosen)
    assert not is_good([StepResult(step=table)])  # its case did not run
    assert is_good([step for step in good_run() if step.step == "versions"])


def test_the_table_has_every_row_and_verdict() -> None:
    text = as_table(good_run())
    for part in (
        "gpu some GPU",
        "copy 4.00 TB/s",
        "decode 64 x 4k",
        "89.5",
        "gather + sdpa flash 10.0",
        "1 of 1 checks",
    ):
        assert part in text
    assert text.count("target ") == len(judge(good_run()))


def test_the_document_is_json_with_verdicts() -> None:
    document = json.loads(as_json(good_run()))
    assert document["machine"]["commit"] == "abc"
    assert [step["step"] for step in document["steps"]] == list(ORDER)
    assert {target["verdict"] for target in document["targets"]} == {"met"}


def test_a_dry_run_is_no_measurement() -> None:
    steps = [StepResult(step="decode", dry=True, rows=(row("decode", "decode 64 x 4k", 1.0),))]
    assert as_table(steps).startswith("DRY RUN")
    assert json.loads(as_json(steps))["targets"] == []
    assert is_good(steps)


def test_the_report_writes_both_and_fails_for_a_failed_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_step(StepResult(step="identity", dry=True, checks=(Check(name="bits", problem="differ"),)), tmp_path)
    arguments = ["--out", str(tmp_path), "--step", "identity", "--write-json", str(tmp_path / "all.json")]
    assert report.main([*arguments, "--write-table", str(tmp_path / "all.txt")]) == 1
    assert "FAILED: bits: differ" in capsys.readouterr().out
    assert "FAILED: bits: differ" in (tmp_path / "all.txt").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))["steps"][0]["failed"] is True
