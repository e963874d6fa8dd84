"""One HTTP request, understood and checked: what the engine is asked, and what form the answer has."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sapwood_server.values.request import Request


@dataclass(frozen=True, kw_only=True)
class Job:
    """Its engine requests, one per prompt, and the answer's form."""

    id: str
    """The response's id; the engine requests' ids begin with it."""
    created: int
    """Unix seconds."""
    model: str
    """The name that the client used."""
    system_fingerprint: str
    requests: tuple[Request, ...]
    ignored: tuple[str, ...]
    """Fields that were sent and have no effect."""
    stream: bool
    include_usage: bool
    return_token_ids: bool

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return sum(request.sampling.n for request in self.requests)

    @property
    def top_logprobs(self) -> int | None:
        """As in SamplingParams."""
        return self.requests[0].sampling.top_logprobs

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response that tell of the request."""
        return {"X-Sapwood-Ignored": ", ".join(self.ignored)} if self.ignored else {}


def new_id(prefix: str) -> str:
    """A fresh response id."""
    return f"{prefix}-{uuid.uuid4().hex}"
