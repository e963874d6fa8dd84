"""Servers with real models, one for each file of tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from sapwood_bench.server_process import sapwood_server
from support.tiny_models import make_tiny_model

Serve = Callable[..., str]

CONTEXT = 4096


@pytest.fixture(name="tiny_model", scope="module")
def tiny_model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a context of 4,096 tokens, named `tiny`."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=CONTEXT)


@pytest.fixture(name="serve", scope="module")
def serve_fixture() -> Iterator[Serve]:
    """`serve(model, *flags)`: the URL of a server that ends with the module."""
    with ExitStack() as stack:
        yield lambda model, *flags: stack.enter_context(sapwood_server(str(model), flags)).base_url


@pytest.fixture(name="tiny_url", scope="module")
def tiny_url_fixture(tiny_model: Path, serve: Serve) -> str:
    """The tiny model in fp32, with the test hooks."""
    return serve(tiny_model, "--dtype", "float32", "--kv-memory", "64MiB", "--enable-test-hooks")


@pytest.fixture(name="client", scope="module")
def client_fixture(tiny_url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client on the tiny model's server."""
    with openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
