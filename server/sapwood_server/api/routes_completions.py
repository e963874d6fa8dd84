"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from sapwood_server.api.answer import answer
from sapwood_server.api.auth import authenticate
from sapwood_server.api.body import decode_body, read_body
from sapwood_server.api.completion_writer import Completion, CompletionWriter
from sapwood_server.api.job import Job
from sapwood_server.api.job_builder import JobBuilder, check_model
from sapwood_server.api.openapi import answers, json_body
from sapwood_server.api.sampling import MAX_TOP_LOGPROBS, integer, outside, to_sampling, token_ids
from sapwood_server.api.service import Service, service_of
from sapwood_server.api.wire_completions import MAX_PROMPTS, CompletionBody, Prompt, to_prompts
from sapwood_server.api.wire_shared import check_fields
from sapwood_server.values.messages import EngineInfo

router = APIRouter()
_decoder = msgspec.json.Decoder(CompletionBody)


@router.post("/v1/completions", openapi_extra=json_body(CompletionBody), responses=answers(Completion, Completion))
async def create_completion(request: Request, tenant: Annotated[str, Depends(authenticate)]) -> Response:
    """Continue one or more raw prompts, whole or as a stream of chunks."""
    service = service_of(request)
    timer = service.metrics.time_request()
    data = await read_body(request, service.max_body_bytes)
    job = await _to_job(request, tenant, decode_body(data, _decoder), len(data))
    return await answer(request, service, job, CompletionWriter(job, service.tokens), timer)


async def _to_job(request: Request, tenant: str, body: CompletionBody, body_bytes: int) -> Job:
    service = service_of(request)
    ignored = check_fields(body)
    check_model(service, body.model)
    info = service.engine.require().info
    top_logprobs = None if body.logprobs is None else integer("logprobs", body.logprobs, 0, 0, MAX_TOP_LOGPROBS)
    sampling = to_sampling(body, info, top_logprobs=top_logprobs, draw_seed=service.draw_seed)
    ids = await service.prompt_threads.run(
        lambda: _prompts(service, body, sampling.n, info), body_bytes, request.receive
    )
    builder = JobBuilder(service=service, info=info, tenant=tenant, id_prefix="cmpl", prompt_field="prompt")
    return builder.build(body, ids, sampling, ignored)


def _prompts(service: Service, body: CompletionBody, n: int, info: EngineInfo) -> list[tuple[int, ...]]:
    """The ids of each prompt."""
    prompts = to_prompts(body.prompt)
    if len(prompts) * n > MAX_PROMPTS:
        raise outside("n", n, f"up to {MAX_PROMPTS} choices over all {len(prompts)} prompts")
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{index}]" for index in range(len(prompts))]
    return [_encode(service, name, prompt, info) for name, prompt in zip(names, prompts, strict=True)]


def _encode(service: Service, name: str, prompt: Prompt, info: EngineInfo) -> tuple[int, ...]:
    """The prompt's ids; of a list of ids, the same ids."""
    if isinstance(prompt, str):
        return service.prompts.encode_text(prompt)
    return token_ids(name, prompt, info.vocab_size)
