"""Answers of `POST /v1/completions`."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from sapwood_server.api.job import Job
from sapwood_server.api.logprobs import CompletionLogprobs, CompletionLogprobsBuilder
from sapwood_server.api.writer import WireUsage, by_choice, encode_event, encoder, to_usage
from sapwood_server.chat.stream import Delta
from sapwood_server.chat.token_text import TokenTexts
from sapwood_server.values.events import Usage
from sapwood_server.values.plan import TokenLogprob


class CompletionChoice(msgspec.Struct, kw_only=True):
    """`choices[]`, of a chunk as of a whole answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    """On a choice only where several prompts were sent together; else on the answer."""


class Completion(msgspec.Struct, kw_only=True):
    """A chunk or a whole answer. In a stream `usage` is as on chat completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: WireUsage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class CompletionWriter:
    """Writes one completion job's answer."""

    def __init__(self, job: Job, tokens: TokenTexts) -> None:
        self._job = job
        num_top = job.top_logprobs or 0
        self._logprobs = [CompletionLogprobsBuilder(tokens, num_top) for _ in range(job.num_choices)]

    def opening(self) -> bytes:
        """Nothing, or an empty chunk with the prompts' ids if they were asked for."""
        if not self._job.return_token_ids:
            return b""
        chunk = self._completion([CompletionChoice(index=index, text="") for index in range(self._job.num_choices)])
        self._add_prompts(chunk)
        return encode_event(chunk)

    def chunk(self, delta: Delta) -> bytes:
        """One chunk, or none if the delta tells nothing."""
        choice = self._choice(delta.choice, [delta])
        if not (choice.text or choice.logprobs or choice.token_ids or choice.finish_reason):
            return b""
        return encode_event(self._completion([choice]))

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk before `[DONE]`, without choices."""
        chunk = self._completion([])
        chunk.usage = to_usage(usage)
        return encode_event(chunk)

    def whole(self, deltas: list[Delta], usage: Usage) -> bytes:
        """The answer of a request that does not stream."""
        groups = by_choice(deltas, self._job.num_choices)
        answer = self._completion([self._choice(index, own) for index, own in enumerate(groups)])
        if self._job.return_token_ids:
            self._add_prompts(answer)
        answer.usage = to_usage(usage)
        return encoder.encode(answer)

    def _choice(self, index: int, deltas: list[Delta]) -> CompletionChoice:
        finish_reason = deltas[-1].finish_reason if deltas else None
        choice = CompletionChoice(
            index=index,
            text="".join(delta.text for delta in deltas),
            logprobs=self._push_logprobs(index, tuple(entry for delta in deltas for entry in delta.logprobs)),
            finish_reason=finish_reason.value if finish_reason else None,
        )
        if self._job.return_token_ids:
            choice.token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        return choice

    def _push_logprobs(self, index: int, entries: tuple[TokenLogprob, ...]) -> CompletionLogprobs | None:
        return self._logprobs[index].push(entries) if entries else None

    def _add_prompts(self, answer: Completion) -> None:
        prompts = [request.prompt_token_ids for request in self._job.requests]
        if len(prompts) == 1:
            answer.prompt_token_ids = prompts[0]
            return
        for choice in answer.choices:
            choice.prompt_token_ids = prompts[choice.index * len(prompts) // len(answer.choices)]

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._job.id,
            created=self._job.created,
            model=self._job.model,
            system_fingerprint=self._job.system_fingerprint,
            choices=choices,
            usage=None if self._job.include_usage else UNSET,
        )
