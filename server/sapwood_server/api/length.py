"""Whether a request fits the model's context and the KV pool, and how many tokens it may generate."""

from __future__ import annotations

from dataclasses import dataclass

from sapwood_server.errors import BadRequestError
from sapwood_server.values.messages import EngineInfo


@dataclass(frozen=True, kw_only=True)
class RequestFields:
    """What a request calls its prompt and the number of tokens to generate, for errors to name."""

    prompt: str
    length: str


@dataclass(frozen=True, kw_only=True)
class LengthRules:
    """The room that there is, in tokens."""

    context: int
    pool: int
    strict: bool
    """Refuse, rather than lower, a `max_tokens` that the context has no room for."""

    @classmethod
    def of(cls, info: EngineInfo, *, strict: bool) -> LengthRules:
        """The engine's context and its pool, of which page 0 is no part."""
        return cls(context=info.max_model_len, pool=(info.num_pages - 1) * info.page_size, strict=strict)

    def budget(self, prompt_tokens: int, max_tokens: int | None, fields: RequestFields) -> int | None:
        """`max_tokens`, lowered to what the context leaves room for; None stays None, which means all there is.

        Raises BadRequestError for a prompt that leaves no room for one token, for a stated need that the pool can never
        hold, and, when strict, for one that the context can't.
        """
        self._check_prompt(prompt_tokens, fields.prompt)
        if max_tokens is None:
            return None
        room = self.context - prompt_tokens
        if max_tokens > room and self.strict:
            raise BadRequestError(
                f"This model's maximum context length is {self.context} tokens. However, you requested "
                f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the messages, {max_tokens} in the "
                "completion).",
                code="context_length_exceeded",
                param=fields.length,
            )
        budget = min(max_tokens, room)
        needed = prompt_tokens + budget
        if needed > self.pool:
            raise BadRequestError(
                f"the request needs room for {needed} tokens ({prompt_tokens} in the prompt, "
                f"{budget} in the completion), but this server's KV pool holds {self.pool}; ask for fewer tokens, or "
                "start the server with a larger --kv-memory",
                code="context_length_exceeded",
                param=fields.length,
            )
        return budget

    def check_messages(self, num_messages: int) -> None:
        """Raises BadRequestError for as many messages as the context has tokens, before anything is made of them.

        A limit of ours: only a template that leaves messages out could make fewer tokens of them.
        """
        if num_messages >= self.context:
            raise self._too_long(f"{num_messages} tokens or more", "messages")

    def _check_prompt(self, prompt_tokens: int, param: str) -> None:
        if prompt_tokens == 0:
            raise BadRequestError("the prompt has no tokens; accepted: at least one", param=param)
        if prompt_tokens >= self.context:
            raise self._too_long(f"{prompt_tokens} tokens", param)
        if prompt_tokens >= self.pool:
            raise BadRequestError(
                f"the prompt has {prompt_tokens} tokens, which leaves no room for one more: this server's KV pool "
                f"holds {self.pool}; shorten it, or start the server with a larger --kv-memory",
                code="context_length_exceeded",
                param=param,
            )

    def _too_long(self, found: str, param: str) -> BadRequestError:
        """OpenAI's words, which clients parse."""
        return BadRequestError(
            f"This model's maximum context length is {self.context} tokens. However, your messages resulted in "
            f"{found}.",
            code="context_length_exceeded",
            param=param,
        )
