"""Draws for tests in which none fails."""

from __future__ import annotations

from collections.abc import Iterable

from sapwood_server.values.plan import Draw, Sampled


def made(draws: Iterable[Draw]) -> list[Sampled]:
    """The same draws, once it is checked that each gave a token."""
    sampled = []
    for draw in draws:
        assert isinstance(draw, Sampled), draw
        sampled.append(draw)
    return sampled


def ids_of(draws: Iterable[Draw]) -> list[int]:
    """The tokens that were drawn."""
    return [one.token_id for one in made(draws)]
