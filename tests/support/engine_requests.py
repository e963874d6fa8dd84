"""Requests for an engine, and what came of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.client import EngineClient
from sapwood_server.engine.client.supervisor import SupervisionPolicy
from sapwood_server.values.events import Event, FinalEvent, TokenEvent
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams
from support import scripted_engine

DEADLINE_SECONDS = 120.0
"""For `asyncio.timeout`: ends a test that hangs; nothing is measured by it."""

QUICK_RESTARTS = SupervisionPolicy(restart_delays=(0.01, 0.01, 0.01))


def make_request(request_id: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 8) -> Request:
    """A greedy request that ends by its length alone."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling)


@dataclass(frozen=True)
class Answer:
    """Everything one stream yielded."""

    token_ids: tuple[int, ...]
    data: bytes
    final: FinalEvent


def answer_of(events: Sequence[Event]) -> Answer:
    """Checks that the last event, and no other, is final."""
    *tokens, final = events
    assert isinstance(final, FinalEvent)
    assert all(isinstance(event, TokenEvent) for event in tokens), "an event followed the final one"
    token_events = [event for event in tokens if isinstance(event, TokenEvent)]
    ids = tuple(token_id for event in token_events for token_id in event.token_ids)
    return Answer(token_ids=ids, data=b"".join(event.data for event in token_events), final=final)


async def ask(client: EngineClient, request: Request) -> Answer:
    """Read the request's stream to its end."""
    return answer_of([event async for event in client.stream(request)])


@contextlib.asynccontextmanager
async def scripted_client(
    model: str = "scripted", policy: SupervisionPolicy = QUICK_RESTARTS, max_num_seqs: int = 64
) -> AsyncIterator[EngineClient]:
    """A client of a scripted engine in a process of its own, closed at the end."""
    config = ServerConfig(model=model, max_num_seqs=max_num_seqs, api_key=("a secret",))
    client = await EngineClient.start(config, command=scripted_engine.COMMAND, policy=policy)
    try:
        yield client
    finally:
        await client.close()
