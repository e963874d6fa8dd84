"""The model's tokenizer, its chat template, and the texts of its special tokens, from a folder or a GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import GgufHeader, read_gguf_header
from sapwood_server.formats.gguf_tokenizer import build_tokenizer, read_vocabulary
from sapwood_server.formats.model_files import (
    MORE_TEMPLATES_FOLDER,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    ModelFiles,
    read_optional_json,
)
from sapwood_server.quoting import reason_of

DEFAULT_TEMPLATE = "default"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""The names under which templates find special tokens."""

_GGUF_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer. Encode with `add_special_tokens=False`: special tokens in the text are recognised, none is added
    (a chat template writes its own begin token; for raw text see `Vocabulary.add_bos`)."""
    if files.is_gguf:
        return build_tokenizer(read_vocabulary(read_gguf_header(files.location)))
    path = files.location / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises no narrower class
        raise StartupError(f"{path}: not a tokenizer: {reason_of(error)}") from error
    # The file may carry the settings of its training; a prompt is neither cut nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def chat_templates(files: ModelFiles) -> Mapping[str, str]:
    """Jinja sources of the chat templates by name: `default`, sometimes others such as `tool_use`; may be empty."""
    if files.is_gguf:
        return _gguf_templates(read_gguf_header(files.location))
    config_path = files.location / TOKENIZER_CONFIG_FILE
    stated = read_optional_json(config_path).get("chat_template")
    if isinstance(stated, list):
        stated = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
    named = stated if isinstance(stated, dict) else {} if stated is None else {DEFAULT_TEMPLATE: stated}
    for name, template in named.items():
        if not isinstance(name, str) or not isinstance(template, str):
            raise StartupError(f"{config_path}: 'chat_template' must be a string, or strings by name")
    paths = sorted((files.location / MORE_TEMPLATES_FOLDER).glob("*.jinja"))
    if (files.location / TEMPLATE_FILE).exists():
        named = named | {DEFAULT_TEMPLATE: _read_text(files.location / TEMPLATE_FILE)}
    return named | {path.stem: _read_text(path) for path in paths}


def _gguf_templates(header: GgufHeader) -> Mapping[str, str]:
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): header.require(key, str) for key in header.metadata if key.startswith(prefix)}
    default = header.get("tokenizer.chat_template", str)
    return named if default is None else named | {DEFAULT_TEMPLATE: default}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: can't be read: {reason_of(error)}") from error


def special_tokens(files: ModelFiles) -> Mapping[str, str]:
    """Texts by name (see `SPECIAL_TOKENS`); a token that the model does not have is left out."""
    if files.is_gguf:
        header = read_gguf_header(files.location)
        tokens = header.array("tokenizer.ggml.tokens", str)
        ids = {name: header.get(key, int) for name, key in _GGUF_IDS.items()}
        return {name: tokens[id_] for name, id_ in ids.items() if id_ is not None and 0 <= id_ < len(tokens)}
    config = read_optional_json(files.location / TOKENIZER_CONFIG_FILE)
    texts = {name: token_text(config.get(name)) for name in SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def token_text(value: Any) -> str | None:
    """A token in a tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
