"""Logprobs in OpenAI's two shapes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sapwood_server.chat.detokenizer import Detokenizer
from sapwood_server.chat.token_text import TokenTexts
from sapwood_server.values.plan import TokenLogprob

LOWEST = -9999.0
"""What OpenAI sends for a token that can't be: JSON has no infinity."""


class TopLogprob(msgspec.Struct):
    """One alternative of a token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    """One sampled token; `bytes` is null for control tokens, which add nothing to the text."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """A choice's `logprobs` on chat completions."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """A choice's `logprobs` on completions: parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


def chat_logprobs(entries: tuple[TokenLogprob, ...] | list[TokenLogprob], tokens: TokenTexts) -> ChatLogprobs:
    """The entries, in order, one per sampled token."""
    return ChatLogprobs(content=[_chat_entry(entry, tokens) for entry in entries])


def _chat_entry(entry: TokenLogprob, tokens: TokenTexts) -> ChatLogprob:
    return ChatLogprob(
        token=tokens.text(entry.token_id),
        logprob=_finite(entry.logprob),
        bytes=_bytes(tokens.data(entry.token_id)),
        top_logprobs=[
            TopLogprob(token=tokens.text(token_id), logprob=_finite(logprob), bytes=_bytes(tokens.data(token_id)))
            for token_id, logprob in entry.top
        ],
    )


@dataclass
class CompletionLogprobsBuilder:
    """One choice's entries as they come; it knows how far into the text each token begins."""

    tokens: TokenTexts
    num_top: int

    def __post_init__(self) -> None:
        self._offset = 0
        self._detokenizer = Detokenizer()

    def push(self, entries: tuple[TokenLogprob, ...]) -> CompletionLogprobs:
        """These entries alone; offsets count characters from the start of the choice's text.

        As with OpenAI, the alternatives include the sampled token where it is not among the most likely.
        """
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(self.tokens.data(entry.token_id)))
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[_finite(entry.logprob) for entry in entries],
            tokens=[self._key(entry.token_id) for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries] if self.num_top else None,
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        return {self._key(token_id): _finite(logprob) for token_id, logprob in pairs}

    def _key(self, token_id: int) -> str:
        """The token's text; of half a character its bytes, so that no two tokens share a name."""
        data = self.tokens.data(token_id)
        try:
            data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return self.tokens.text(token_id)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _bytes(data: bytes) -> list[int] | None:
    return list(data) if data else None
