"""`sapwood serve`: its flags, the starts that fail, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
import typer
from typer.testing import CliRunner

from sapwood_bench.server_process import SERVE_COMMAND
from sapwood_server.__main__ import main
from sapwood_server.api.listener import bind, url_of
from sapwood_server.commands import OnProgress, describe, run_server, seed_source, serve
from sapwood_server.config import ServerConfig
from sapwood_server.engine.client.client import EngineClient
from sapwood_server.engine.client.supervisor import SupervisionPolicy
from sapwood_server.errors import EngineLostError
from sapwood_server.flags import config_command
from support import scripted_engine
from support.api_client import data_of
from support.api_service import MODEL, ScriptedEngine, make_service, says
from support.scripted_engine import KILL_ID
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import make_tiny_model

PATIENCE_SECONDS = 60.0

IMPORTS_NO_TORCH = """
import sys
from sapwood_server.api.app import create_app
from sapwood_server.commands import build_service
from sapwood_server.config import ServerConfig
create_app(build_service(ServerConfig(model=sys.argv[1])))
heavy = {"torch", "transformers", "triton"} & sys.modules.keys()
sys.exit(f"the API process imported {heavy}" if heavy else 0)
"""


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """What a start that fails prints on stderr."""
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments])
    assert caught.value.code == code
    return capsys.readouterr().err


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a start that fails prints."""
    (line,) = refusal(capsys, *arguments).splitlines()
    assert line.startswith("sapwood: ")
    return line


def test_every_field_of_the_configuration_is_a_flag() -> None:
    got: list[ServerConfig] = []
    command = config_command(got.append, http=True)
    names = {parameter.name for parameter in command.__signature__.parameters.values()}  # type: ignore[attr-defined]
    assert names == {field.name for field in dataclasses.fields(ServerConfig)} | {"positional_model"}


def test_keys_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[ServerConfig] = []
    app = typer.Typer()
    app.command()(config_command(got.append, http=True))
    monkeypatch.setenv("SAPWOOD_API_KEY", "one two")
    for arguments in ([], ["--api-key", "three"]):
        CliRunner().invoke(app, arguments)
    assert [config.api_key for config in got] == [("one", "two"), ("three",)]


def test_the_port_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[ServerConfig] = []
    app = typer.Typer()
    app.command()(config_command(got.append, http=True))
    monkeypatch.setenv("SAPWOOD_PORT", "8123")
    for arguments in ([], ["--port", "9"]):
        CliRunner().invoke(app, arguments)
    assert [config.port for config in got] == [8123, 9]


@pytest.mark.parametrize("command", [["generate", "m", "p"], ["doctor", "m"]], ids=lambda command: command[0])
@pytest.mark.parametrize("flag", ["--host", "--port", "--api-key", "--served-model-name", "--enable-test-hooks"])
def test_a_command_that_answers_no_http_refuses_its_flags(
    capsys: pytest.CaptureFixture[str], command: list[str], flag: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, flag, "1"])
    assert caught.value.code == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--colour", "--max-num-seq", "--prefixcache"])
def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    (line,) = refusal(capsys, "m", flag, "1", code=2).splitlines()
    assert flag in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("serve --port abc", ("sapwood serve", "--port is 'abc'", "integer")),
        ("serve m --port=abc", ("--port is 'abc'", "integer")),
        ("serve --port 1 --port x", ("--port is 'x'",)),
        ("serve --gpu-memory-utilization much", ("--gpu-memory-utilization is 'much'", "number")),
        ("generate m p --temperature 9", ("sapwood generate", "--temperature is '9'", "less than or equal to 2")),
        ("bench ttft --repeats x", ("sapwood bench ttft", "--repeats is 'x'", "integer")),
        ("serve --port " + "9" * 5000, ("--port is '9999",)),
        ("serve --prefix-cache=3", ("--prefix-cache", "does not take a value")),
        ("serve --dtype", ("--dtype", "requires an argument")),
        ("serve --max-num-seq 3", ("--max-num-seq", "--max-num-seqs")),
        ("serve m n", ("extra argument", "n")),
        ("generate", ("sapwood generate", "prompt")),
        ("serv", ("'serv'", "serve", "generate")),
        ("bench all all", ("extra argument", "all")),
        ("bench speed", ("'speed'", "cpu-speed")),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str], arguments: str, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sapwood")
    assert all(word in line for word in words), line
    assert len(line) < 400


@pytest.mark.parametrize("arguments", [[], ["bench"]], ids=str)
def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "Commands" in printed.out
    assert printed.err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dtype", "int3"), ("--dtype", "int3", "bfloat16")),
        (("--port", "99999"), ("--port", "99999", "65535")),
        (("--page-size", "17"), ("--page-size", "17", "16, 32, 64")),
        (("--kv-memory", "lots"), ("lots", "GiB")),
        (("--max-model-len", "0"), ("--max-model-len", "0")),
        (("--host", ""), ("--host", "empty")),
        (("--api-key", ""), ("--api-key", "empty")),
        (("--api-key", "key\n"), ("--api-key", "white space")),
        (("",), ("''",)),
        (("--model", ""), ("''",)),
        (("a", "--model", "b"), ("'a'", "'b'")),
        (("/no/such/folder",), ("/no/such/folder",)),
        (("nobody/nothing-of-this-name",), ("nobody/nothing-of-this-name",)),
    ],
    ids=str,
)
def test_a_bad_value_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    line = one_line(capsys, *arguments)
    assert all(word in line for word in words)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"{", b"[]"], ids=["missing", "cut", "of another shape"])
def test_a_broken_folder_is_one_line_that_names_the_file(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder = make_tiny_model(tmp_path / "broken")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        main(["serve", str(folder), "--port", "0"])
    assert caught.value.code == 1
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    assert name in errors.splitlines()[-1] or str(folder) in errors.splitlines()[-1]


def test_a_file_that_is_no_gguf_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(b"GGUF but not really" * 100)
    assert "wrong.gguf" in one_line(capsys, str(path))


def test_a_gguf_that_is_cut_off_is_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    make_tiny_gguf(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(SystemExit) as caught:
        main(["serve", str(path), "--port", "0"])
    assert caught.value.code == 1
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    assert "cut.gguf" in errors.splitlines()[-1]


def test_too_little_memory_is_one_line_with_both_numbers(capfd: pytest.CaptureFixture[str], model: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", str(model), "--port", "0", "--kv-memory", "20KiB"])
    assert caught.value.code == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("sapwood: ")
    assert re.search(r"is [\d.]+ \w+, but one sequence of 256 tokens needs [\d.]+ \w+", last), last


def test_a_template_that_cannot_be_parsed_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert "can't be parsed" in one_line(capsys, str(folder))


def test_a_taken_port_is_one_line(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = one_line(capsys, str(model), "--port", port)
    assert port in line


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, word in ((["--version"], "0."), (["--help"], "serve"), (["serve", "--help"], "--max-model-len")):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert word in capsys.readouterr().out


def test_the_api_process_never_imports_torch(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_NO_TORCH, str(model)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_seeds_follow_one_another_and_a_drawn_start_differs() -> None:
    draw = seed_source(2**64 - 1)
    assert [draw(), draw()] == [2**64 - 1, 0]
    assert seed_source(0)() != seed_source(0)()


def test_the_ready_line_says_what_is_served_and_where() -> None:
    line = describe("http://127.0.0.1:8000", ("a", "b"), ScriptedEngine(says("")).info)
    for word in ("http://127.0.0.1:8000", "a or b", "none", "nothing is computed", "4096 tokens", "1024 KV pages"):
        assert word in line
    assert "deterministic" not in line
    info = msgspec.structs.replace(ScriptedEngine(says("")).info, deterministic=True)
    assert "(nothing is computed), deterministic; context" in describe("http://127.0.0.1:8000", ("a",), info)


def test_a_server_that_cannot_run_does_not_end_in_silence(model: Path) -> None:
    with ThreadPoolExecutor(1) as not_the_main_thread:
        served = not_the_main_thread.submit(serve, ServerConfig(model=str(model), port=0))
        with pytest.raises(RuntimeError, match="main thread"):
            served.result()


def test_an_engine_that_keeps_dying_ends_the_server_once_its_requests_have_their_errors() -> None:
    service = make_service(None)
    policy = SupervisionPolicy(restart_delays=(0.01,))
    killing = {"model": MODEL, "prompt": [1, KILL_ID]}
    endless = {"model": MODEL, "prompt": [1, 2], "max_tokens": 100_000, "ignore_eos": True, "stream": True}

    def start_engine(on_progress: OnProgress) -> Awaitable[EngineClient]:
        config = ServerConfig(model="scripted")
        return EngineClient.start(config, command=scripted_engine.COMMAND, on_progress=on_progress, policy=policy)

    async def until_ready(client: httpx.AsyncClient) -> None:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)

    async def use(client: httpx.AsyncClient) -> str:
        await until_ready(client)
        assert (await client.post("/v1/completions", json=killing)).status_code == 500
        await until_ready(client)
        async with client.stream("POST", "/v1/completions", json=endless) as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            killer = asyncio.create_task(client.post("/v1/completions", json=killing))
            text += "".join([piece async for piece in pieces])
            assert (await killer).status_code == 500
        return text

    async def run() -> str:
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.closing(bind("127.0.0.1", 0)) as listener:
                server = asyncio.create_task(run_server(service, listener, start_engine))
                async with httpx.AsyncClient(base_url=url_of(listener), timeout=PATIENCE_SECONDS) as client:
                    text = await use(client)
                with pytest.raises(EngineLostError, match=r"SIGKILL\)\); restarted 1 times already"):
                    await server
        return text

    data = data_of(asyncio.run(run()))
    assert json.loads(data[-1])["error"]["message"] == "the engine process died (signal 9 (SIGKILL))"


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(name="sockets")
def sockets_fixture() -> Iterator[Path]:
    """A temporary directory for a server's own; pytest's has too long a name for a socket."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_and_its_engine_and_leaves_nothing(
    model: Path, tmp_path: Path, sockets: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out:
        command = [*SERVE_COMMAND, str(model), "--port", "0"]
        process = subprocess.Popen(command, stderr=out, stdout=out, env={**os.environ, "TMPDIR": str(sockets)})
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"ready at " not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        engines = children_of(process.pid)
        assert len(engines) == 1
        url = log.read_text().partition("ready at ")[2].partition(": ")[0]
        assert httpx.get(f"{url}/ready").status_code == 200
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == 0, log.read_text()
        assert not any(Path(f"/proc/{engine}").exists() for engine in engines)
        assert list(sockets.glob("sapwood-*")) == []
        assert "Traceback" not in log.read_text()
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
