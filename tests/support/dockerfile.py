"""A Dockerfile as its instructions, and what a `.dockerignore` leaves of a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continued lines joined."""

    keyword: str
    argument: str

    @property
    def words(self) -> list[str]:
        """The arguments: of the JSON form its strings, else what white space parts."""
        form = self.argument[self.argument.index("[") :] if self.argument.endswith("]") else ""
        return list(json.loads(form)) if form else self.argument.split()

    @property
    def commands(self) -> list[list[str]]:
        """Of a RUN: the words of each command that `&&` chains."""
        return [command.split() for command in self.argument.split("&&")]


def read_dockerfile(path: Path) -> list[Instruction]:
    """The instructions in order."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parted = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [Instruction(keyword.upper(), " ".join(argument.split())) for keyword, _, argument in parted]


def build_context(folder: Path, ignore_file: Path) -> list[Path]:
    """The files of `folder` that Docker sends to the build, relative to it: the last pattern that matches a file, or a
    folder that it lies in, decides, and `!` lets it in."""
    lines = [line.strip() for line in ignore_file.read_text(encoding="utf-8").splitlines()]
    patterns = [line for line in lines if line and not line.startswith("#")]
    let_in = {Path(pattern[1:]).parts[0] for pattern in patterns if pattern.startswith("!")}
    found: list[Path] = []
    for top in folder.iterdir():
        if top.name in let_in or not _is_ignored(Path(top.name), patterns):  # a large folder need not be walked
            found += [top, *top.rglob("*")]
    files = [path.relative_to(folder) for path in sorted(found) if path.is_file()]
    return [path for path in files if not _is_ignored(path, patterns)]


def _is_ignored(path: Path, patterns: list[str]) -> bool:
    ignored = False
    names = [str(path), *(str(parent) for parent in path.parents if parent != Path())]
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        if any(_matches(name, wanted) for name in names):
            ignored = not pattern.startswith("!")
    return ignored


def _matches(name: str, pattern: str) -> bool:
    """`*` stands for anything but a slash, a leading `**/` for any folders."""
    if pattern.startswith("**/"):
        parts = name.split("/")
        return any(_matches("/".join(parts[start:]), pattern[3:]) for start in range(len(parts)))
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)
