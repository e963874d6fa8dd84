"""Requests that share a prefix and arrive at once: how often the prefix is computed."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer

from sapwood_bench.client import complete, get
from sapwood_bench.machine import this_machine
from sapwood_bench.report import Figure, Report, publish
from sapwood_bench.server_process import sapwood_server
from sapwood_bench.workload import PromptMaker
from sapwood_server.values.demo import DEMO_MODEL

_COMPUTED = re.compile(r'^sapwood_prompt_tokens_total\{source="computed"\} (\S+)$', re.MULTILINE)
_ANSWER_TOKENS = 4


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("shared-prefix")(shared_prefix)


def shared_prefix(
    model: Annotated[str, typer.Option(help="Model to serve.")] = DEMO_MODEL,
    requests: Annotated[int, typer.Option(help="Requests sent at once.")] = 16,
    prefix: Annotated[int, typer.Option(help="Tokens that all prompts share.")] = 1000,
    suffix: Annotated[int, typer.Option(help="Tokens of each prompt's own.")] = 20,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prompt tokens computed for requests that share a prefix and are sent at once, from usage and from /metrics."""
    maker = PromptMaker(model, seed=12)
    shared = maker.prompt(prefix)
    prompts = [shared + maker.prompt(suffix) for _ in range(requests)]
    machine = this_machine()
    with sapwood_server(model) as server, ThreadPoolExecutor(requests) as pool:
        before = computed_tokens(server.base_url)
        answers = list(pool.map(lambda prompt: complete(server.base_url, prompt, _ANSWER_TOKENS), prompts))
        counted = computed_tokens(server.base_url) - before
    reported = sum(answer.prompt_tokens - answer.cached_tokens for answer in answers)
    once = prefix + requests * suffix
    figures = (
        Figure(name="prompt tokens sent", value=sum(answer.prompt_tokens for answer in answers), unit="tokens"),
        Figure(name="computed, if the prefix is computed once", value=once, unit="tokens"),
        Figure(name="computed, by usage", value=reported, unit="tokens", at_most=once),
        Figure(name="computed, by /metrics", value=counted, unit="tokens", at_most=once),
    )
    settings = {"model": model, "requests": requests, "prefix": prefix, "suffix": suffix}
    publish(Report(bench="shared-prefix", machine=machine, settings=settings, figures=figures), as_json=json)


def computed_tokens(base_url: str) -> float:
    """Prompt tokens that went through the model since the server's start."""
    match = _COMPUTED.search(get(base_url, "/metrics").decode())
    return float(match[1]) if match else 0.0
