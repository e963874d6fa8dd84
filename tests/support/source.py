"""The repository's own source files, parsed: what the architecture tests look at."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "sapwood_server": ROOT / "server" / "sapwood_server",
    "sapwood_kernels": ROOT / "kernels" / "sapwood_kernels",
    "sapwood_agent": ROOT / "agent" / "sapwood_agent",
    "sapwood_bench": ROOT / "bench" / "sapwood_bench",
}


@dataclass(frozen=True)
class Module:
    """One source file of ours: its import name, its path and its syntax tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def where(self) -> str:
        """The path from the repository's root, for messages."""
        return str(self.path.relative_to(ROOT))


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the four packages, by name."""
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            found.append(Module(name, path, text, ast.parse(text, filename=str(path))))
    return tuple(found)


def imported_names(tree: ast.AST) -> list[tuple[int, str]]:
    """`(line, dotted name)` of every absolute import anywhere in the tree."""
    names: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append((node.lineno, node.module))
    return names
