"""`sapwood serve`: puts the server together and runs it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Callable

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
from sapwood_server.flags import config_command
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.formats.tokenizer import load_tokenizer
from sapwood_server.formats.vocabulary import load_vocabulary
from sapwood_server.progress import progress_bar
from sapwood_server.values.messages import EngineInfo


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("serve")(config_command(serve, http=True))


def serve(config: ServerConfig) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API."""
    _set_up_logging(config.log_level)
    service = build_service(config)
    with contextlib.closing(bind(config.host, config.port)) as listener:
        asyncio.run(_run(config, service, listener))


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


async def _run(config: ServerConfig, service: Service, listener: socket.socket) -> None:
    """Serve until told to stop. The socket is open from the start: `/health` answers while the model loads."""
    server = HttpServer(create_app(service), lambda: _close_engine(service))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(_load(config, service, url_of(listener)))
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
        await serving
    finally:
        server.should_exit = True
        loading.cancel()
        await asyncio.gather(serving, loading, return_exceptions=True)
        await _close_engine(service)


async def _close_engine(service: Service) -> None:
    if isinstance(service.engine.engine, EngineClient):
        await service.engine.engine.close()


async def _load(config: ServerConfig, service: Service, url: str) -> None:
    with progress_bar() as on_progress:
        service.engine.engine = await EngineClient.start(
            config, on_progress=on_progress, on_step=service.metrics.observe_step
        )
    typer.echo(describe(url, service.model_names, service.engine.engine.info), err=True)


def describe(url: str, names: tuple[str, ...], info: EngineInfo) -> str:
    """The line that says what is served, where and how."""
    return (
        f"Sapwood is ready at {url}: {' or '.join(names)} ({info.architecture}) in {info.dtype} on {info.device} "
        f"({info.dtype_reason}); context {info.max_model_len} tokens, {info.num_pages - 1} KV pages of "
        f"{info.page_size} tokens; loaded in {info.load_seconds:.1f} s"
    )


def _set_up_logging(level: str) -> None:
    """Our own log lines on stderr at this level; those of libraries only from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("sapwood_server").setLevel(level.upper())
