"""What `check()` raises: one of our own invariants does not hold."""

from __future__ import annotations


class IntegrityError(RuntimeError):
    """The cache's or the scheduler's books are wrong: a bug in this program, never a caller's mistake."""


def require(holds: bool, message: str) -> None:
    """Raise IntegrityError(message) unless `holds`."""
    if not holds:
        raise IntegrityError(message)
