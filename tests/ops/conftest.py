"""What the tests of the ops share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def triton_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the compile gate keeps kernels between workers and runs; Triton hashes sources, options and version."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)  # none with `-p no:cacheprovider`
    return cache.mkdir("triton") if cache is not None else tmp_path_factory.mktemp("triton")
