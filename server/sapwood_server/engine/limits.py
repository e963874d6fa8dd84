"""What one engine can hold, and whether a request can ever fit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sapwood_server.values.request import Request


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Sizes that the scheduler plans within."""

    num_pages: int
    """Page 0, which is reserved, included."""
    page_size: int
    max_num_seqs: int
    """Most sequences that hold pages at once; each of a request's `n` choices counts."""
    max_batched_tokens: int
    """Most tokens computed in one step."""
    max_model_len: int
    """Longest prompt + completion."""
    prefix_cache: bool = True
    strict_max_tokens: bool = False
    """Refuse prompt + max_tokens over `max_model_len` instead of ending at it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 2 if field.name == "num_pages" else 1
            if not isinstance(value, bool) and value < least:
                raise ValueError(f"{field.name} is {value}; accepted: at least {least}")

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return (self.num_pages - 1) * self.page_size


def completion_budget(request: Request, limits: SchedulerLimits) -> int:
    """Most tokens that each choice of `request` may generate.

    That is `max_tokens`, or what the context leaves; without `max_tokens` also no more than the pool leaves. Raises
    ValueError, with both numbers, for a request that could never run to its end: its need is the prompt and one
    choice's completion (choices take turns if they must). A `max_tokens` past the context only counts up to it.
    """
    prompt = len(request.prompt_token_ids)
    asked = request.sampling.max_tokens
    if prompt == 0:
        raise ValueError("the prompt has 0 tokens; at least 1 is needed")
    if asked is not None and asked < 1:
        raise ValueError(f"max_tokens is {asked}; accepted: at least 1")
    context_room = limits.max_model_len - prompt
    if context_room < 1:
        raise ValueError(
            f"the prompt has {prompt} tokens and the context holds {limits.max_model_len}: no room for a completion"
        )
    if limits.strict_max_tokens and asked is not None and asked > context_room:
        raise ValueError(f"prompt and max_tokens are {prompt + asked} tokens, the context holds {limits.max_model_len}")
    need = prompt + (1 if asked is None else min(asked, context_room))
    if need > limits.pool_tokens:
        raise ValueError(f"the request needs room for {need} tokens, the KV pool holds {limits.pool_tokens}")
    return min(context_room, limits.pool_tokens - prompt) if asked is None else min(asked, context_room)
