"""`sapwood serve`: puts the server together and runs it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import typer

from sapwood_server.api.app import create_app
from sapwood_server.api.auth import KeyRing
from sapwood_server.api.engine import EngineSlot
from sapwood_server.api.listener import HttpServer, bind, url_of
from sapwood_server.api.metrics import Metrics
from sapwood_server.api.service import Service
from sapwood_server.chat.load import load_prompt_encoder
from sapwood_server.chat.token_text import TokenTexts
from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.client import EngineClient
from sapwood_server.errors import EngineLostError
from sapwood_server.flags import config_command
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.tokenizer import load_tokenizer
from sapwood_server.formats.vocabulary import load_vocabulary
from sapwood_server.progress import progress_bar
from sapwood_server.values.messages import EngineInfo

OnProgress = Callable[[str, float], None]
StartEngine = Callable[[OnProgress], Awaitable[EngineClient]]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("serve")(config_command(serve, http=True))


def serve(config: ServerConfig) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    _set_up_logging(config.log_level)
    service = build_service(config)

    def start_engine(on_progress: OnProgress) -> Awaitable[EngineClient]:
        return EngineClient.start(config, on_progress=on_progress, on_step=service.metrics.observe_step)

    with contextlib.closing(bind(config.host, config.port)) as listener:
        asyncio.run(run_server(service, listener, start_engine))


def build_service(config: ServerConfig) -> Service:
    """All that the API needs but the engine, which loads in a process of its own. Raises StartupError."""
    files = resolve_model(config.model)
    tokenizer = load_tokenizer(files)
    vocabulary = load_vocabulary(files)
    return Service(
        model_names=config.served_model_name or (files.name,),
        created=int(time.time()),
        engine=EngineSlot(),
        prompts=load_prompt_encoder(files, tokenizer, vocabulary),
        tokens=TokenTexts(tokenizer, vocabulary.token_bytes),
        keys=KeyRing(config.api_key),
        metrics=Metrics(),
        draw_seed=seed_source(config.seed),
        strict_max_tokens=config.strict_max_tokens,
        enable_test_hooks=config.enable_test_hooks,
    )


def seed_source(seed: int) -> Callable[[], int]:
    """Seeds for requests that bring none: the n-th request gets the n-th after `seed`; 0 draws a start."""
    numbers = itertools.count(seed or secrets.randbits(64))
    return lambda: next(numbers) % 2**64


async def run_server(service: Service, listener: socket.socket, start_engine: StartEngine) -> None:
    """Serve until told to stop. The socket is open from the start: `/health` answers while the model loads.

    Raises StartupError if the engine can't start, EngineLostError once it has died too often; requests that ran then
    get their error before the server ends.
    """
    server = HttpServer(create_app(service), lambda: _close_engine(service))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    engine = asyncio.create_task(_run_engine(service, url_of(listener), start_engine))
    try:
        await asyncio.wait({serving, engine}, return_when=asyncio.FIRST_COMPLETED)
        if engine.done():
            engine.result()
        await serving
    finally:
        server.should_exit = True
        engine.cancel()
        await asyncio.gather(serving, engine, return_exceptions=True)
        await _close_engine(service)


async def _run_engine(service: Service, url: str, start_engine: StartEngine) -> NoReturn:
    """Load the model, then watch over the engine. Ends by being cancelled, or with what went wrong."""
    with progress_bar() as on_progress:
        engine = service.engine.engine = await start_engine(on_progress)
    typer.echo(describe(url, service.model_names, engine.info), err=True)
    reason = await engine.given_up()
    raise EngineLostError(f"the engine is down for good: {reason}")


async def _close_engine(service: Service) -> None:
    if isinstance(service.engine.engine, EngineClient):
        await service.engine.engine.close()


def describe(url: str, names: tuple[str, ...], info: EngineInfo) -> str:
    """The line that says what is served, where and how."""
    deterministic = ", deterministic" if info.deterministic else ""
    return (
        f"Sapwood is ready at {url}: {' or '.join(names)} ({info.architecture}) in {info.dtype} on {info.device} "
        f"({info.dtype_reason}){deterministic}; context {info.max_model_len} tokens, {info.num_pages - 1} KV pages of "
        f"{info.page_size} tokens; loaded in {info.load_seconds:.1f} s"
    )


def _set_up_logging(level: str) -> None:
    """Our own log lines on stderr at this level; those of libraries only from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("sapwood_server").setLevel(level.upper())
