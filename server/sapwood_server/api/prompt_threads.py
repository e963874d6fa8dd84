"""Where prompts are made: off the event loop, which has everybody's streams to serve meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

BIG_BODY_BYTES = 64 * 2**10
"""Some 16,000 tokens: rendered and encoded in about 20 ms."""
MOST_BIG_AT_ONCE = 2
"""Rendering is Python: each thread that renders takes turns from the event loop, and takes one of the few threads."""


class PromptThreads:
    """Makes prompts in threads: big ones a few at a time, so that small ones never wait for them."""

    def __init__(self, most_big_at_once: int = MOST_BIG_AT_ONCE) -> None:
        self._big = asyncio.Semaphore(most_big_at_once)

    async def run(self, make: Callable[[], T], body_bytes: int) -> T:
        """What `make` returns or raises. `body_bytes`: the size of the request that the prompt is made of."""
        if body_bytes < BIG_BODY_BYTES:
            return await asyncio.to_thread(make)
        async with self._big:
            return await asyncio.to_thread(make)
