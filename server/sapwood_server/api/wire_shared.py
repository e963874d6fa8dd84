"""The fields that chat completions and completions have in common.

A field is implemented (typed here), accepted without effect (`IGNORED`, named in the response's `X-Sapwood-Ignored`),
or refused (`REFUSED`, but for the values listed, which ask for nothing). `null` means absent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_server.errors import BadRequestError
from sapwood_server.quoting import quote_json

IGNORED = (
    "user",
    "metadata",
    "client_metadata",
    "store",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "verbosity",
)

REFUSED: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "session_id": (),
    "parent_session_id": (),
    "keep_alive": (),
    "ephemeral": (False,),
    "history": (),
    "include": ([],),
    "reasoning_effort": (),
    "continue_final_message": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
    "suffix": (),
    "best_of": (1,),
    "echo": (False,),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SharedBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a request may say on either route."""

    model: str
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    forced_tokens: str | list[int | str | list[int]] | None = None

    user: Any = None
    metadata: Any = None
    client_metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None

    session_id: Any = None
    parent_session_id: Any = None
    keep_alive: Any = None
    ephemeral: Any = None
    history: Any = None
    include: Any = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def length_field(self) -> str:
        """What this client calls the number of tokens to generate; errors about it name that field."""
        return "max_tokens"

    @property
    def length(self) -> int | None:
        """How many tokens to generate; None if the client does not say."""
        value: int | None = getattr(self, self.length_field)
        return value


def check_fields(body: SharedBody) -> tuple[str, ...]:
    """The fields that were sent and have no effect. Raises BadRequestError for one that is not implemented."""
    sent = [name for name in body.__struct_fields__ if getattr(body, name) is not None]
    for name in sent:
        if name in REFUSED and not _is_listed(getattr(body, name), REFUSED[name]):
            raise _refusal(name, getattr(body, name))
    ignored = [name for name in sent if name in IGNORED]
    if body.stream_options is not None:
        if not body.stream:
            raise BadRequestError("stream_options is only accepted with stream: true", param="stream_options")
        if body.stream_options.include_obfuscation:
            ignored.append("stream_options.include_obfuscation")
    return tuple(ignored)


def _is_listed(value: Any, listed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(item) and value == item for item in listed)


def _refusal(name: str, value: Any) -> BadRequestError:
    shown = quote_json(value)
    listed = [quote_json(item) for item in REFUSED[name]]
    accepted = f"accepted: {' or '.join(listed)}, or leave it out" if listed else "leave it out"
    return BadRequestError(
        f"{name} is {shown}, which this server does not implement; {accepted}", code="unsupported_parameter", param=name
    )
