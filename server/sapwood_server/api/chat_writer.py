"""Answers of `POST /v1/chat/completions`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from sapwood_server.api.job import Job
from sapwood_server.api.logprobs import ChatLogprobs, chat_logprobs
from sapwood_server.api.writer import WireUsage, by_choice, encode_event, encoder, to_usage
from sapwood_server.chat.stream import Delta
from sapwood_server.chat.token_text import TokenTexts
from sapwood_server.values.events import Usage
from sapwood_server.values.plan import TokenLogprob


class ChunkDelta(msgspec.Struct):
    """`choices[].delta`."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """`choices[]` of a chunk."""

    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Chunk(msgspec.Struct, kw_only=True):
    """One chunk. `usage` is absent unless the client asked for it; then it is null on all chunks but the last."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: WireUsage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class AnswerMessage(msgspec.Struct):
    """`choices[].message`."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """`choices[]` of a whole answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: WireUsage
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatWriter:
    """Writes one chat job's answer."""

    def __init__(self, job: Job, tokens: TokenTexts) -> None:
        self._job = job
        self._tokens = tokens
        self._prompt_token_ids = job.requests[0].prompt_token_ids if job.return_token_ids else UNSET

    def opening(self) -> bytes:
        """A chunk that opens each choice with its role."""
        choices = [
            ChunkChoice(index=index, delta=ChunkDelta(role="assistant", content=""))
            for index in range(self._job.num_choices)
        ]
        first, *others = [self._chunk(choice) for choice in choices]
        first.prompt_token_ids = self._prompt_token_ids
        return b"".join(map(encode_event, (first, *others)))

    def chunk(self, delta: Delta) -> bytes:
        """Text, logprobs and ids in one chunk, the finish in another after it, as OpenAI does."""
        data = b""
        logprobs = self._logprobs(delta.logprobs)
        with_ids = self._job.return_token_ids and delta.token_ids
        if delta.text or logprobs is not None or with_ids:
            choice = ChunkChoice(index=delta.choice, delta=ChunkDelta(content=delta.text), logprobs=logprobs)
            if with_ids:
                choice.token_ids = delta.token_ids
            data = encode_event(self._chunk(choice))
        if delta.finish_reason is not None:
            finish = ChunkChoice(index=delta.choice, delta=ChunkDelta(), finish_reason=delta.finish_reason.value)
            data += encode_event(self._chunk(finish))
        return data

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk before `[DONE]`, without choices."""
        chunk = self._chunk()
        chunk.usage = to_usage(usage)
        return encode_event(chunk)

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        """The answer of a request that does not stream."""
        answer = ChatCompletion(
            id=self._job.id,
            created=self._job.created,
            model=self._job.model,
            system_fingerprint=self._job.system_fingerprint,
            choices=[self._choice(index, own) for index, own in enumerate(by_choice(deltas, self._job.num_choices))],
            usage=to_usage(usage),
            prompt_token_ids=self._prompt_token_ids,
        )
        return encoder.encode(answer)

    def _choice(self, index: int, deltas: list[Delta]) -> ChatChoice:
        finish_reason = deltas[-1].finish_reason if deltas else None
        return ChatChoice(
            index=index,
            message=AnswerMessage(role="assistant", content="".join(delta.text for delta in deltas)),
            logprobs=self._logprobs(tuple(entry for delta in deltas for entry in delta.logprobs)),
            finish_reason=finish_reason.value if finish_reason else None,
            token_ids=[i for delta in deltas for i in delta.token_ids] if self._job.return_token_ids else UNSET,
        )

    def _logprobs(self, entries: tuple[TokenLogprob, ...]) -> ChatLogprobs | None:
        if self._job.top_logprobs is None or not entries:
            return None
        return chat_logprobs(entries, self._tokens)

    def _chunk(self, *choices: ChunkChoice) -> Chunk:
        return Chunk(
            id=self._job.id,
            created=self._job.created,
            model=self._job.model,
            system_fingerprint=self._job.system_fingerprint,
            choices=list(choices),
            usage=None if self._job.include_usage else UNSET,
        )
