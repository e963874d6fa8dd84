"""The documents name files and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.source import PACKAGES, ROOT

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md")])
BASES = (ROOT, PACKAGES["sapwood_server"], PACKAGES["sapwood_kernels"])
NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|md|txt|toml))`")
LIFE = ROOT / "docs" / "life_of_a_request.md"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(document: Path) -> None:
    names = NAMED_FILE.findall(document.read_text(encoding="utf-8"))
    assert [name for name in names if not any((base / name).exists() for base in BASES)] == []


def test_the_life_of_a_request_passes_through_every_room() -> None:
    text = LIFE.read_text(encoding="utf-8")
    rooms = [path.name for path in PACKAGES["sapwood_server"].iterdir() if (path / "__init__.py").exists()]
    assert [room for room in rooms if f"`{room}/" not in text] == []
