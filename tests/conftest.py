"""What holds for the whole suite: threads, offline libraries, hypothesis' profile, and the scale of the counts."""

from __future__ import annotations

import os
from collections.abc import Callable

import hypothesis
import pytest

from support.scale import scaled, suite_scale

# Read by torch, OpenMP and tokenizers when first imported, here and in the servers that tests start. One thread
# each, so that two xdist workers on two cores do not fight for them, and so that sums have one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read when a kernel is defined: the suite runs them in Triton's interpreter, on the CPU. The compile gate does not.
os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: no test asserts on a clock. Derandomised: the slice that `make test` runs is the same one every time.
hypothesis.settings.register_profile("sapwood", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("sapwood")


def pytest_report_header() -> str:
    """Names the scale at the top of a run, so that a log says how much it proved."""
    return f"sapwood: SAPWOOD_TEST_SCALE={suite_scale():g}, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"


@pytest.fixture(name="scaled")
def scaled_fixture() -> Callable[..., int]:
    """`scaled(n, minimum=1)`: the count to run of `n`; in decorators import it from `support.scale`."""
    return scaled
