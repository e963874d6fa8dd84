"""What to say about a checkpoint's tensors that are missing, left over or misshapen: always file and tensor."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sapwood_server.errors import StartupError
from sapwood_server.quoting import quote

_MOST_NAMED = 3


def missing_tensor(path: Path, name: str) -> StartupError:
    return StartupError(f"{path}: tensor {quote(name)} is missing")


def wrong_shape(path: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> StartupError:
    return StartupError(f"{path}: tensor {quote(name)} has shape {list(found)}, expected {list(expected)}")


def unused_tensors(path: Path, names: Collection[str]) -> StartupError:
    """Of many names the first few, and how many more there are."""
    shown = ", ".join(quote(name) for name in sorted(names)[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return StartupError(f"{path}: the model has no use for tensor {shown}{more}")
