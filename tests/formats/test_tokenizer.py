"""Tokenizer, templates and special tokens of both kinds of models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import ModelFiles, resolve_model
from sapwood_server.formats.tokenizer import chat_templates, load_tokenizer, special_tokens
from support.tiny_gguf import make_tiny_gguf
from support.tiny_models import CHAT_TEMPLATE, make_tiny_model


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON file; a value of `...` removes the key."""
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))


@pytest.fixture
def folder(tmp_path: Path) -> ModelFiles:
    return resolve_model(str(make_tiny_model(tmp_path / "m")))


@pytest.fixture
def file(tmp_path: Path) -> ModelFiles:
    make_tiny_gguf(tmp_path / "m.gguf")
    return resolve_model(str(tmp_path / "m.gguf"))


def test_prompts_are_neither_cut_nor_padded(folder: ModelFiles) -> None:
    """Some published tokenizer.json files still carry the truncation and padding of their training."""
    tokenizer = load_tokenizer(folder)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder.location / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog"
    ids = load_tokenizer(folder).encode(text, add_special_tokens=False).ids
    assert 4 < len(ids) < 64
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        '{"model": {"type": "Nothing"}}',
        '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
    ],
)
def test_a_broken_tokenizer_file_is_named(content: str, folder: ModelFiles) -> None:
    (folder.location / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json: not a tokenizer: ") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_templates_of_a_folder(folder: ModelFiles) -> None:
    config = folder.location / "tokenizer_config.json"
    assert chat_templates(folder) == {"default": CHAT_TEMPLATE}
    edit_json(config, chat_template=[{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}])
    assert chat_templates(folder) == {"default": "A", "tool_use": "B"}
    (folder.location / "chat_template.jinja").write_text("Ç")
    (folder.location / "additional_chat_templates").mkdir()
    (folder.location / "additional_chat_templates" / "rag.jinja").write_text("D")
    assert chat_templates(folder) == {"default": "Ç", "tool_use": "B", "rag": "D"}


def test_a_model_without_a_template(folder: ModelFiles) -> None:
    edit_json(folder.location / "tokenizer_config.json", chat_template=...)
    assert chat_templates(folder) == {}
    (folder.location / "tokenizer_config.json").unlink()
    assert chat_templates(folder) == {}
    assert special_tokens(folder) == {}


@pytest.mark.parametrize("template", [3, [{"name": "default"}], [{"template": "A"}]])
def test_templates_of_a_wrong_type(template: Any, folder: ModelFiles) -> None:
    edit_json(folder.location / "tokenizer_config.json", chat_template=template)
    expected = "tokenizer_config.json: 'chat_template' must be a string, or strings by name"
    with pytest.raises(StartupError, match=re.escape(expected)):
        chat_templates(folder)


def test_a_template_file_that_is_not_text(folder: ModelFiles) -> None:
    (folder.location / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(StartupError, match=r"chat_template\.jinja: can't be read"):
        chat_templates(folder)


def test_templates_and_special_tokens_of_a_gguf(file: ModelFiles, folder: ModelFiles) -> None:
    assert chat_templates(file) == chat_templates(folder)
    assert special_tokens(file) == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert special_tokens(file) == special_tokens(folder)


def test_special_tokens_given_as_objects(folder: ModelFiles) -> None:
    edit_json(folder.location / "tokenizer_config.json", bos_token={"content": "<|im_start|>", "lstrip": False})
    assert special_tokens(folder)["bos_token"] == "<|im_start|>"
