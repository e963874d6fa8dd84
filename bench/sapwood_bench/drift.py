"""How often a greedy answer differs between a warm and a cold cache, in a dtype that rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from sapwood_bench.client import chat
from sapwood_bench.machine import this_machine
from sapwood_bench.report import Figure, Report, publish
from sapwood_bench.server_process import sapwood_server
from sapwood_bench.workload import conversations
from sapwood_server.values.demo import DEMO_MODEL

Message = dict[str, str]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("drift")(drift)


def drift(
    model: Annotated[str, typer.Option(help="Model to serve.")] = DEMO_MODEL,
    dtype: Annotated[str, typer.Option(help="The server's --dtype.")] = "auto",
    count: Annotated[int, typer.Option("--conversations", help="Conversations.")] = 200,
    turns: Annotated[int, typer.Option(help="Turns in each.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Most tokens in a reply.")] = 32,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Share of greedy replies that differ between a server that reuses KV and one that recomputes everything.

    The warm server holds each conversation. Every later prompt is then sent, just as it was, to a server with
    --no-prefix-cache. First turns are left out: there is nothing to reuse.
    """
    machine = this_machine()
    flags = ("--dtype", dtype)
    warm: list[tuple[list[Message], str]] = []
    reused = 0
    with sapwood_server(model, flags) as server:
        for questions in conversations(count, turns, seed=14):
            replies, cached = hold(server.base_url, questions, max_tokens)
            warm += replies
            reused += cached
    with sapwood_server(model, (*flags, "--no-prefix-cache")) as server:
        differing = sum(chat(server.base_url, prompt, max_tokens)[0] != reply for prompt, reply in warm)
    figures = (
        Figure(name="conversations", value=count, unit=""),
        Figure(name="replies compared", value=len(warm), unit=""),
        Figure(name="prompt tokens reused by them", value=reused, unit="tokens"),
        Figure(name="replies that differ", value=differing, unit=""),
        Figure(name="share that differs", value=100 * differing / len(warm), unit="%"),
    )
    settings = {"model": model, "dtype": dtype, "turns": turns, "max_tokens": max_tokens}
    publish(Report(bench="drift", machine=machine, settings=settings, figures=figures), as_json=json)


def hold(base_url: str, questions: Sequence[str], max_tokens: int) -> tuple[list[tuple[list[Message], str]], int]:
    """Holds one conversation: the messages and the reply of every turn after the first, and their cached tokens."""
    messages: list[Message] = []
    turns: list[tuple[list[Message], str]] = []
    cached = 0
    for question in questions:
        messages.append({"role": "user", "content": question})
        usage: dict[str, Any]
        reply, usage = chat(base_url, messages, max_tokens)
        if len(messages) > 1:
            turns.append((list(messages), reply))
            cached += usage["prompt_tokens_details"]["cached_tokens"]
        messages.append({"role": "assistant", "content": reply})
    return turns, cached
