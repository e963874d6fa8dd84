"""The harness that breaks modules on purpose must itself be able to fail: what it reports is what happened."""

from __future__ import annotations

import importlib
import os
import signal
from types import ModuleType

import numpy as np
import pytest

from sapwood_kernels import fold as fold_file
from support.mutants import Mutant, run_mutants, survivors

FOLD = "sapwood_kernels.fold"
CHECK = "sapwood_kernels.check"


def checks(module: ModuleType) -> None:
    """Of `check_heads`, and that whoever imports the module gets the copy: `values` imports `check` as well."""
    module.check_heads(8, 2)
    with pytest.raises(ValueError, match="accepted: a multiple"):
        module.check_heads(8, 3)
    values = importlib.import_module("sapwood_kernels.values")
    assert values.check_indices is module.check_indices


def checks_that_always_fail(module: ModuleType) -> None:
    assert module is None


def checks_that_end_by_what_they_find(module: ModuleType) -> None:
    """Crashes, hangs or raises as a mutant's constant says."""
    if module.LOG2_E == 11:
        os.kill(os.getpid(), signal.SIGSEGV)
    while module.LOG2_E == 5:
        pass
    if module.LOG2_E == 1:
        raise KeyError("not an AssertionError")
    if module.LOG2_E == 3:
        raise SystemExit(0)


def fold_constant(value: str) -> Mutant:
    return Mutant(FOLD, f"LOG2_E = {np.log2(np.e):.16f}", f"LOG2_E = {value}")


def test_a_mutant_that_matters_is_killed_and_one_that_does_not_lives() -> None:
    broken = Mutant(CHECK, "or num_heads % num_kv_heads:", "or num_heads % 2:")
    harmless = Mutant(CHECK, '"""Every key-value head serves', '"""Each key-value head serves')
    outcomes = run_mutants([broken, harmless], checks)
    assert [(outcome.mutant, outcome.killed) for outcome in outcomes] == [(broken, True), (harmless, False)]
    assert "DID NOT RAISE" in outcomes[0].how
    assert outcomes[1].how == ""
    assert survivors([broken, harmless], checks) == [harmless]


def test_a_crash_a_hang_and_any_exception_count_as_noticed() -> None:
    mutants = [fold_constant(value) for value in ("11", "5", "1", "3")]
    outcomes = run_mutants(mutants, checks_that_end_by_what_they_find, timeout_seconds=2)
    assert [outcome.killed for outcome in outcomes] == [True] * 4
    assert [outcome.how for outcome in outcomes[:2]] == ["SIGSEGV", "timeout"]
    assert "KeyError" in outcomes[2].how


def test_checks_that_fail_on_the_unbroken_module_prove_nothing() -> None:
    with pytest.raises(RuntimeError, match=r"fail on an unbroken copy of sapwood_kernels\.fold"):
        run_mutants([fold_constant("1")], checks_that_always_fail)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (Mutant(FOLD, "no such text", ""), "occurs 0 times"),
        (Mutant(FOLD, "tl.tensor", "tl.constexpr"), r"occurs \d+ times in sapwood_kernels\.fold; accepted: exactly"),
        (Mutant(FOLD, "import triton\n", "import triton\n"), "replaced by itself"),
        (Mutant(FOLD, "import triton\n", "import\n"), "isn't Python"),
        (Mutant("sapwood_kernels.no_such", "a", "b"), "there is no module"),
        (Mutant(CHECK, "import torch\n", "import no_such_torch\n"), "can't be imported"),
    ],
)
def test_a_mutant_that_cannot_be_made_is_refused(mutant: Mutant, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_mutants([mutant], checks)


def test_checks_that_no_other_process_can_import_are_refused() -> None:
    with pytest.raises(ValueError, match="at the top of a file"):
        run_mutants([fold_constant("1")], lambda module: None)


def test_the_real_module_is_left_alone() -> None:
    survivors([fold_constant("1")], checks_that_end_by_what_they_find)
    assert pytest.approx(np.log2(np.e)) == fold_file.LOG2_E
