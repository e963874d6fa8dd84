"""An API without an engine process: a byte tokenizer, an engine that follows a script, a real server around them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sapwood_server.api.app import create_app
from sapwood_server.api.auth import KeyRing
from sapwood_server.api.engine import Engine, EngineSlot
from sapwood_server.api.http_protocol import HttpProtocol
from sapwood_server.api.listener import bind, server_config, url_of
from sapwood_server.api.metrics import Metrics
from sapwood_server.api.service import Service
from sapwood_server.chat.prompt import PromptEncoder
from sapwood_server.chat.template import ChatTemplate
from sapwood_server.chat.token_text import TokenTexts
from sapwood_server.engine.client.client import EngineClient
from sapwood_server.errors import UnavailableError
from sapwood_server.formats.vocabulary import byte_alphabet
from sapwood_server.values.events import Event, FinalEvent, FinishReason, TokenEvent, Usage
from sapwood_server.values.messages import EngineInfo, EngineStats
from sapwood_server.values.plan import TokenLogprob
from sapwood_server.values.request import Request

MODEL = "scripted"
VOCAB_SIZE = 260
START_ID, END_ID, BOS_ID = 256, 257, 258
SPECIAL_TEXTS = {START_ID: "<|im_start|>", END_ID: "<|im_end|>", BOS_ID: "<|bos|>"}

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name + (call.function.arguments | tojson) }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HANG = threading.Event()
"""In a script, an event that is not set lets nothing pass until it is; this one never will be."""

Script = Callable[[Request], Iterable[Event | threading.Event]]


def byte_tokenizer() -> Tokenizer:
    """One token per byte, whose id is the byte, and three special ones."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TEXTS.values()])
    return tokenizer


def token_bytes() -> tuple[bytes, ...]:
    """What each id adds to a text."""
    return (*(bytes([byte]) for byte in range(256)), *(b"" for _ in range(256, VOCAB_SIZE)))


def prompt_text(request: Request) -> str:
    """The prompt as text, special tokens included."""
    return b"".join(
        SPECIAL_TEXTS[id_].encode() if id_ in SPECIAL_TEXTS else bytes([id_]) for id_ in request.prompt_token_ids
    ).decode()


def says(
    text: str | bytes,
    *,
    per_event: int = 1,
    finish: FinishReason = FinishReason.STOP,
    cached: int = 0,
) -> Script:
    """Each choice says `text`, some bytes an event, then ends: with the end token if by itself."""
    data = text.encode() if isinstance(text, str) else text

    def script(request: Request) -> Iterator[Event]:
        for choice in range(request.sampling.n):
            yield from _choice_events(request, choice, data, per_event, finish)
        yield final(request, completion=(len(data) + (finish is FinishReason.STOP)) * request.sampling.n, cached=cached)

    return script


def _choice_events(
    request: Request, choice: int, data: bytes, per_event: int, finish: FinishReason
) -> Iterator[TokenEvent]:
    pieces = [data[start : start + per_event] for start in range(0, len(data), per_event)]
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1 and finish is not FinishReason.STOP
        yield tokens(request, piece, choice=choice, finish=finish if last else None)
    if finish is FinishReason.STOP:
        yield TokenEvent(
            request_id=request.request_id,
            choice=choice,
            token_ids=(END_ID,),
            logprobs=_logprobs(request, (END_ID,)),
            finish_reason=finish,
        )


def tokens(request: Request, data: bytes, *, choice: int = 0, finish: FinishReason | None = None) -> TokenEvent:
    """An event of one token per byte."""
    return TokenEvent(
        request_id=request.request_id,
        choice=choice,
        token_ids=tuple(data),
        data=data,
        logprobs=_logprobs(request, tuple(data)),
        finish_reason=finish,
    )


def final(request: Request, *, completion: int = 0, cached: int = 0, error: str | None = None) -> FinalEvent:
    """The last event."""
    usage = Usage(
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=cached,
        completion_tokens=completion,
        computed_tokens=len(request.prompt_token_ids) - cached,
    )
    return FinalEvent(request_id=request.request_id, usage=usage, error=error)


def _logprobs(request: Request, ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """Token i has probability 2^-(i % 7 + 1), and its neighbours as alternatives."""
    count = request.sampling.top_logprobs
    if count is None:
        return ()
    return tuple(
        TokenLogprob(
            token_id=id_,
            logprob=-0.5 * (id_ % 7 + 1),
            top=tuple(((id_ + step) % 256, -0.5 * (step + 1)) for step in range(count)),
        )
        for id_ in ids
    )


class ScriptedEngine:
    """Follows a script, and remembers what it was asked and which streams were closed before their end."""

    def __init__(self, script: Script, **info: Any) -> None:
        self.script = script
        self.info = EngineInfo(**({**_INFO, **info}))
        self.ready = True
        self.failure: str | None = None
        self.stats = EngineStats()
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.cancellation = threading.Event()

    def stream(self, request: Request) -> AsyncGenerator[Event, None]:
        """As EngineClient's."""
        if not self.ready:
            raise UnavailableError("the engine is restarting")
        self.requests.append(request)
        return self._events(request)

    async def _events(self, request: Request) -> AsyncGenerator[Event, None]:
        ended = False
        try:
            for item in self.script(request):
                await asyncio.sleep(0)
                if isinstance(item, threading.Event):
                    while not item.is_set():
                        await asyncio.sleep(0.005)
                    continue
                ended = isinstance(item, FinalEvent)
                yield item
        finally:
            if not ended:
                self.cancelled.append(request.request_id)
                self.cancellation.set()


_INFO = {
    "model": MODEL,
    "architecture": "none",
    "fingerprint": "0123456789abcdef",
    "device": "none",
    "dtype": "none",
    "dtype_reason": "nothing is computed",
    "deterministic": False,
    "vocab_size": VOCAB_SIZE,
    "max_model_len": 4096,
    "page_size": 16,
    "num_pages": 1025,
    "kv_bytes_per_token": 0,
    "max_batched_tokens": 512,
    "max_num_seqs": 64,
    "weight_bytes": 0,
    "load_seconds": 0.0,
}


def make_service(
    engine: Engine | None,
    *,
    templates: Mapping[str, str] | None = None,
    keys: Sequence[str] = (),
    bos_id: int | None = None,
    **settings: Any,
) -> Service:
    """A service around this engine. `templates`: None for a ChatML one, {} for a model without."""
    tokenizer = byte_tokenizer()
    sources = {"default": CHAT_TEMPLATE} if templates is None else templates
    return Service(
        **{
            "model_names": (MODEL,),
            "created": 1_700_000_000,
            "engine": EngineSlot(engine),
            "prompts": PromptEncoder(
                tokenizer=tokenizer,
                template=ChatTemplate(sources, {"eos_token": "<|im_end|>"}) if sources else None,
                bos_id=bos_id,
                end_of_turn_id=END_ID,
            ),
            "tokens": TokenTexts(tokenizer, token_bytes()),
            "keys": KeyRing(keys),
            "metrics": Metrics(),
            "draw_seed": itertools.count(1000).__next__,
            **settings,
        }
    )


@contextlib.contextmanager
def running(
    service: Service,
    start_engine: Callable[[], Awaitable[EngineClient]] | None = None,
    *,
    protocol: type[HttpProtocol] = HttpProtocol,
) -> Iterator[str]:
    """A real HTTP server on a free port of 127.0.0.1, in a thread. Yields its URL.

    With `start_engine`, the service's engine is started in the server's event loop, and closed with it.
    """
    listener = bind("127.0.0.1", 0)
    app = create_app(service)
    server = uvicorn.Server(server_config(app, graceful_seconds=1, protocol=protocol))

    async def serve() -> None:
        if start_engine is None:
            await server.serve(sockets=[listener])
            return
        engine = await start_engine()
        service.engine.engine = engine
        try:
            await server.serve(sockets=[listener])
        finally:
            await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
