"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from sapwood_server.api.wire_shared import SharedBody
from sapwood_server.errors import BadRequestError
from sapwood_server.quoting import quote_json

MAX_PROMPTS = 1024

Prompt = str | list[int]
"""Text, or token ids."""


class CompletionBody(SharedBody, kw_only=True, forbid_unknown_fields=True):
    """A completion request."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None

    suffix: Any = None
    best_of: Any = None
    echo: Any = None


def to_prompts(prompt: str | list[int | str | list[int]]) -> list[Prompt]:
    """The prompts, in order. Raises BadRequestError for an empty or a mixed list."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if not prompts or ids or len({type(item) for item in prompts}) > 1 or len(prompts) > MAX_PROMPTS:
        raise BadRequestError(
            f"prompt is {quote_json(prompt)}; accepted: a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} "
            "of either, not mixed",
            param="prompt",
        )
    return prompts
