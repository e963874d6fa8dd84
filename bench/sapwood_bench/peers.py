"""Prefill and decode speed beside llama.cpp's server and transformers, each asked in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sapwood_bench import llama_cpp
from sapwood_bench.client import Timed, complete
from sapwood_bench.machine import this_machine
from sapwood_bench.report import Figure, Report, publish
from sapwood_bench.server_process import sapwood_server
from sapwood_bench.transformers_process import transformers_process
from sapwood_bench.workload import PromptMaker
from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.quoting import LINE_CHARACTERS, quote
from sapwood_server.values.demo import DEMO_MODEL

PREFILL_TOKENS = 3019
SHORT_CONTEXT = 100
LONG_CONTEXT = 3000
Complete = Callable[[Sequence[int], int], Timed]


@dataclass(frozen=True)
class Speeds:
    """Medians of one peer, in tokens per second."""

    prefill: float
    decode_short: float
    decode_long: float


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("peers")(peers)


def peers(
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's llama-server, built for this machine.")] = None,
    transformers: Annotated[bool, typer.Option(help="Measure transformers as well.")] = True,
    model: Annotated[str, typer.Option(help="Model to serve; a GGUF for llama.cpp.")] = DEMO_MODEL,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens to decode.")] = 64,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prefill at about 3,000 tokens and decode at 100 and 3,000 tokens of context: ours and each peer's, and ratios.

    All answer in turn, round by round: a machine that drifts meanwhile shifts no ratio.
    """
    machine = this_machine()
    with ExitStack() as stack:
        servers: dict[str, Complete] = {}
        ours = stack.enter_context(sapwood_server(model)).base_url
        servers["sapwood"] = lambda prompt, count: complete(ours, prompt, count)
        if llama_server is not None:
            gguf = resolve_model(model).gguf
            if gguf is None:
                raise StartupError(f"--model is {quote(model, LINE_CHARACTERS)}; llama.cpp needs a GGUF file")
            context = LONG_CONTEXT + max_tokens + 256
            theirs = stack.enter_context(llama_cpp.llama_server(llama_server, gguf, machine.cores, context)).base_url
            servers["llama.cpp"] = lambda prompt, count: llama_cpp.complete(theirs, prompt, count)
        if transformers:
            servers["transformers"] = stack.enter_context(transformers_process(model))
        speeds = measure(servers, PromptMaker(model, seed=15), repeats, max_tokens)
    settings = {"model": model, "rounds": repeats, "decoded tokens": max_tokens, "threads": machine.cores}
    figures = tuple(compare(speeds))
    publish(Report(bench="peers", machine=machine, settings=settings, figures=figures), as_json=json)


def measure(servers: dict[str, Complete], maker: PromptMaker, repeats: int, max_tokens: int) -> dict[str, Speeds]:
    """Each server in turn, every round with new prompts; the first round, with its one-off costs, is dropped."""
    rounds: dict[str, list[Speeds]] = {name: [] for name in servers}
    for _ in range(repeats + 1):
        prompts = [maker.prompt(count) for count in (PREFILL_TOKENS, SHORT_CONTEXT, LONG_CONTEXT)]
        for name, ask in servers.items():
            prefill = ask(prompts[0], 2).prefill_tokens_per_second
            decode = [ask(prompt, max_tokens).decode_tokens_per_second for prompt in prompts[1:]]
            rounds[name].append(Speeds(prefill, *decode))
    return {name: _median(measured[1:]) for name, measured in rounds.items()}


def compare(speeds: dict[str, Speeds]) -> Iterator[Figure]:
    """Every peer's speeds, then ours over theirs with the targets."""
    for name, speed in speeds.items():
        yield Figure(name=f"{name}: prefill, {PREFILL_TOKENS} tokens", value=speed.prefill, unit="tokens/s")
        yield Figure(name=f"{name}: decode at {SHORT_CONTEXT}", value=speed.decode_short, unit="tokens/s")
        yield Figure(name=f"{name}: decode at {LONG_CONTEXT}", value=speed.decode_long, unit="tokens/s")
    targets = {"llama.cpp": Speeds(2.0, 1.5, 0.8), "transformers": Speeds(1.0, 1.0, 1.0)}
    ours = speeds["sapwood"]
    for name, target in targets.items():
        if name in speeds:
            their = speeds[name]
            pairs = (
                ("prefill", ours.prefill / their.prefill, target.prefill),
                (f"decode at {SHORT_CONTEXT}", ours.decode_short / their.decode_short, target.decode_short),
                (f"decode at {LONG_CONTEXT}", ours.decode_long / their.decode_long, target.decode_long),
            )
            for what, ratio, at_least in pairs:
                yield Figure(name=f"sapwood / {name}: {what}", value=ratio, unit="x", at_least=at_least)


def _median(rounds: Sequence[Speeds]) -> Speeds:
    return Speeds(
        prefill=statistics.median(speed.prefill for speed in rounds),
        decode_short=statistics.median(speed.decode_short for speed in rounds),
        decode_long=statistics.median(speed.decode_long for speed in rounds),
    )
