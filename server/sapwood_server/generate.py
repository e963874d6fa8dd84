"""`sapwood generate MODEL PROMPT`: one answer on the command line, from the same engine that serves."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer

from sapwood_server.chat.load import load_prompt_encoder
from sapwood_server.chat.messages import Message
from sapwood_server.chat.prompt import PromptEncoder
from sapwood_server.chat.stream import ChoiceStream
from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.client import EngineClient
from sapwood_server.errors import BadRequestError, InternalError
from sapwood_server.flags import config_command
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.tokenizer import load_tokenizer
from sapwood_server.formats.vocabulary import load_vocabulary
from sapwood_server.progress import progress_bar
from sapwood_server.quoting import quote
from sapwood_server.values.events import FinalEvent, Usage
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 256


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A finished answer, as `--json` prints it."""

    text: str
    finish_reason: str | None
    usage: Usage
    seed: int
    dtype: str
    device: str


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("generate")(config_command(generate))


def generate(
    config: ServerConfig,
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue PROMPT as it is, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print the answer and its usage as one JSON object.")] = False,
) -> None:
    """Answer PROMPT once: the text goes to stdout as it is generated, everything else to stderr."""
    files = resolve_model(config.model)
    vocabulary = load_vocabulary(files)
    prompts = load_prompt_encoder(files, load_tokenizer(files), vocabulary)
    request = Request(
        request_id="generate",
        prompt_token_ids=encode(prompts, prompt, raw=raw),
        sampling=SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=config.seed or secrets.randbits(64)
        ),
    )
    answer = asyncio.run(answer_once(config, request, (lambda _text: None) if json else _print_at_once))
    sys.stdout.write((msgspec.json.encode(answer).decode() if json else "") + "\n")


def encode(prompts: PromptEncoder, prompt: str, *, raw: bool) -> tuple[int, ...]:
    """The prompt's ids: as the user's one message where the model has a chat template, unless `raw`.

    Raises BadRequestError for a prompt of no tokens, and for one that the template refuses.
    """
    if raw or prompts.template is None:
        ids = prompts.encode_text(prompt)
    else:
        ids = prompts.encode_chat((Message(role="user", content=prompt),), (), {})
    if not ids:
        raise BadRequestError(f"PROMPT is {quote(prompt)}; accepted: a text of at least one token")
    return ids


async def answer_once(config: ServerConfig, request: Request, on_text: Callable[[str], None]) -> Answer:
    """Starts an engine, runs the one request, gives each piece of its text to `on_text`, and ends the engine.

    Raises StartupError if the engine can't start, BadRequestError for a prompt that leaves no room in the context,
    InternalError if the engine fails.
    """
    with progress_bar() as on_progress:
        engine = await EngineClient.start(config, on_progress=on_progress)
    try:
        room = engine.info.max_model_len
        if len(request.prompt_token_ids) >= room:
            length = len(request.prompt_token_ids)
            raise BadRequestError(f"PROMPT is {length} tokens; accepted: fewer than the context's {room}")
        return await _collect(engine, request, on_text)
    finally:
        await engine.close()


async def _collect(engine: EngineClient, request: Request, on_text: Callable[[str], None]) -> Answer:
    deltas = ChoiceStream()
    texts: list[str] = []
    finish_reason: str | None = None
    final: FinalEvent | None = None
    async with contextlib.aclosing(engine.stream(request)) as events:
        async for event in events:
            if isinstance(event, FinalEvent):
                final = event
                break
            delta = deltas.push(event)
            texts.append(delta.text)
            on_text(delta.text)
            finish_reason = delta.finish_reason.value if delta.finish_reason else None
    if final is None or final.error is not None:
        raise InternalError("the engine ended without an answer" if final is None else str(final.error))
    return Answer(
        text="".join(texts),
        finish_reason=finish_reason,
        usage=final.usage,
        seed=request.sampling.seed,
        dtype=engine.info.dtype,
        device=engine.info.device,
    )


def _print_at_once(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
