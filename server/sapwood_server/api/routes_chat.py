"""`POST /v1/chat/completions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from sapwood_server.api.answer import answer
from sapwood_server.api.auth import authenticate
from sapwood_server.api.body import decode_body, read_body
from sapwood_server.api.chat_writer import ChatCompletion, ChatWriter, Chunk
from sapwood_server.api.job import Job
from sapwood_server.api.job_builder import JobBuilder, check_model
from sapwood_server.api.length import LengthRules
from sapwood_server.api.openapi import answers, json_body
from sapwood_server.api.sampling import MAX_TOP_LOGPROBS, integer, to_sampling, token_ids
from sapwood_server.api.service import Service, service_of
from sapwood_server.api.wire_chat import ChatBody, ignored_in_messages, to_messages
from sapwood_server.api.wire_shared import check_fields
from sapwood_server.api.wire_tools import check_tools
from sapwood_server.errors import BadRequestError
from sapwood_server.quoting import quote_json
from sapwood_server.values.messages import EngineInfo

router = APIRouter()
_decoder = msgspec.json.Decoder(ChatBody)


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatBody), responses=answers(ChatCompletion, Chunk))
async def create_chat_completion(request: Request, tenant: Annotated[str, Depends(authenticate)]) -> Response:
    """Answer a conversation, whole or as a stream of chunks."""
    service = service_of(request)
    timer = service.metrics.time_request()
    data = await read_body(request, service.max_body_bytes)
    job = await _to_job(request, tenant, decode_body(data, _decoder), len(data))
    return await answer(request, service, job, ChatWriter(job, service.tokens), timer)


@dataclass(frozen=True)
class _Prompt:
    """The prompt's ids, and the fields of its messages that have no effect."""

    ids: tuple[int, ...]
    ignored: tuple[str, ...] = ()


async def _to_job(request: Request, tenant: str, body: ChatBody, body_bytes: int) -> Job:
    service = service_of(request)
    ignored = check_fields(body)
    check_model(service, body.model)
    info = service.engine.require().info
    _check_length_fields(body)
    sampling = to_sampling(body, info, top_logprobs=_top_logprobs(body), draw_seed=service.draw_seed)
    prompt = await service.prompt_threads.run(lambda: _prompt(service, body, info), body_bytes, request.receive)
    field = "messages" if body.prompt_token_ids is None else "prompt_token_ids"
    builder = JobBuilder(service=service, info=info, tenant=tenant, id_prefix="chatcmpl", prompt_field=field)
    return builder.build(body, [prompt.ids], sampling, ignored + prompt.ignored)


def _prompt(service: Service, body: ChatBody, info: EngineInfo) -> _Prompt:
    """The rendered messages, or the ids that came in their place."""
    tools = check_tools(body.tools or [])
    if body.prompt_token_ids is not None:
        if body.messages:
            raise BadRequestError(
                "prompt_token_ids stands in place of messages; accepted: one of the two", param="prompt_token_ids"
            )
        if body.chat_template_kwargs is not None:
            raise BadRequestError(
                "chat_template_kwargs are for the rendering of messages; accepted: none beside prompt_token_ids",
                param="chat_template_kwargs",
            )
        return _Prompt(token_ids("prompt_token_ids", body.prompt_token_ids, info.vocab_size))
    if body.messages is None:
        raise BadRequestError("missing field: 'messages' is required", code="missing_field", param="messages")
    LengthRules.of(info, strict=service.strict_max_tokens).check_messages(len(body.messages))
    ids = service.prompts.encode_chat(to_messages(body.messages), tools, body.chat_template_kwargs or {})
    return _Prompt(ids, ignored_in_messages(body.messages))


def _check_length_fields(body: ChatBody) -> None:
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise BadRequestError(
            f"max_tokens is {older} and max_completion_tokens is {newer}; accepted: one of them, or equal values",
            param="max_tokens",
        )


def _top_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return integer("top_logprobs", body.top_logprobs, 0, 0, MAX_TOP_LOGPROBS)
    if body.top_logprobs is not None:
        raise BadRequestError(
            f"top_logprobs is {quote_json(body.top_logprobs)} without logprobs: true; accepted: both",
            param="top_logprobs",
        )
    return None
