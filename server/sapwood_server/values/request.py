"""What the API process asks of the engine."""

from __future__ import annotations

import msgspec

from sapwood_server.values.sampling import SamplingParams


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation request, as token ids."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    """At least one id, each in `[0, vocab_size)`; checked by the route."""
    sampling: SamplingParams
    salt: str = ""
    """Requests share cached pages only within one salt."""
    priority: int = 0
    """Lower is admitted first."""
    forced_tokens: tuple[tuple[int, ...], ...] = ()
    """Test hook: empty, or one tuple per choice. While a choice has forced ids left they replace what was sampled;
    computing, caching, stop matching and streaming stay real."""
