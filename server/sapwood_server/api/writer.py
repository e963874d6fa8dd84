"""What a response's two forms, whole and streamed, have in common."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import msgspec

from sapwood_server.api.generation import Generation
from sapwood_server.api.job import Job
from sapwood_server.api.sse import DONE, event
from sapwood_server.chat.stream import Delta
from sapwood_server.values.events import Usage

encoder = msgspec.json.Encoder()


class PromptTokensDetails(msgspec.Struct):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class WireUsage(msgspec.Struct):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def to_usage(usage: Usage) -> WireUsage:
    """Usage as OpenAI reports it."""
    return WireUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


class Writer(Protocol):
    """Writes one job's answer in one route's shape."""

    def opening(self) -> bytes:
        """Events sent with the first delta."""
        ...

    def chunk(self, delta: Delta) -> bytes:
        """The events of one delta; empty if there is nothing to tell."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The one event that carries the usage."""
        ...

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        """The answer of a request that does not stream."""
        ...


async def write_stream(job: Job, generation: Generation, writer: Writer) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. Closing it cancels the job."""
    opened = False
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            data = writer.chunk(delta)
            if not opened:
                opened, data = True, writer.opening() + data
            if data:
                yield data
    if job.include_usage:
        yield writer.usage_chunk(generation.usage) + DONE
    else:
        yield DONE


async def write_whole(generation: Generation, writer: Writer) -> bytes:
    """The whole answer. Cancelling this cancels the job."""
    async with aclosing(generation.deltas()) as deltas:
        collected = [delta async for delta in deltas]
    return writer.whole(collected, generation.usage)


def by_choice(deltas: list[Delta], num_choices: int) -> list[list[Delta]]:
    """Each choice's deltas, in order."""
    groups: list[list[Delta]] = [[] for _ in range(num_choices)]
    for delta in deltas:
        groups[delta.choice].append(delta)
    return groups


def encode_event(value: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return event(encoder.encode(value))
