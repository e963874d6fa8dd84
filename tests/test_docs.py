"""The documents name files and commands that exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from sapwood_server.api.wire_chat import ChatBody
from sapwood_server.api.wire_completions import CompletionBody
from sapwood_server.api.wire_shared import IGNORED, REFUSED
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


def test_every_field_of_a_request_is_in_the_api_page() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    fields = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert sorted(field for field in fields if f"`{field}`" not in text) == []


@pytest.mark.parametrize(("heading", "fields"), [("**Accepted without", IGNORED), ("**Refused with 400**", REFUSED)])
def test_fields_are_listed_in_their_class(heading: str, fields: Iterable[str]) -> None:
    paragraph = next(
        part
        for part in (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("\n\n")
        if part.startswith(heading)
    )
    listed_elsewhere = {"service_tier"}  # ignored at two values, refused at any other
    assert [field for field in fields if f"`{field}`" not in paragraph and field not in listed_elsewhere] == []
