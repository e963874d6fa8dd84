"""Where prompts are made: off the event loop, which has everybody's streams to serve meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

from sapwood_server.api.disconnect import unless_gone
from sapwood_server.errors import UnavailableError

T = TypeVar("T")

BIG_BODY_BYTES = 64 * 2**10
"""Some 16,000 tokens: rendered and encoded in about 20 ms."""
MOST_BIG_AT_ONCE = 2
"""Rendering is Python: each thread that renders takes turns from the event loop."""
MOST_BIG = 18
"""Rendered or waiting: each holds a body of up to `max_body_bytes`."""


class PromptThreads:
    """Makes prompts in threads: big ones in a few of their own, so that small ones never wait for them.

    A client that leaves takes its prompt with it, unless that is being rendered: Python can't stop a thread, which then
    stays taken to its end.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_BIG_AT_ONCE, thread_name_prefix="big-prompt")
        self._num_big = 0

    async def run(self, make: Callable[[], T], body_bytes: int, receive: Receive) -> T:
        """What `make` returns or raises. `body_bytes`: the size of the request that the prompt is made of; `receive`:
        that request's, its body read.

        Raises ClientGone if the client leaves before, UnavailableError if too many big ones are at it already.
        """
        if body_bytes < BIG_BODY_BYTES:
            return await asyncio.to_thread(make)
        if self._num_big >= MOST_BIG:
            raise UnavailableError(
                f"{self._num_big} requests of over {BIG_BODY_BYTES} bytes are waiting to be rendered; try again",
                code="overloaded",
            )
        self._num_big += 1
        try:
            return await unless_gone(receive, self._in_thread(make))
        finally:
            self._num_big -= 1

    async def _in_thread(self, make: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, make)
