"""A ModelConfig from a model's files, whichever kind they are."""

from __future__ import annotations

from sapwood_server.formats.gguf_metadata import read_gguf_header
from sapwood_server.formats.model_files import CONFIG_FILE, ModelFiles, read_json
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.config_gguf import config_from_gguf
from sapwood_server.model.config_json import config_from_json


def load_model_config(files: ModelFiles) -> ModelConfig:
    """The checked configuration. StartupError naming file, key, value and what is accepted for anything the decoder
    does not implement: it would compute something else than the model's authors did."""
    if files.is_gguf:
        config = config_from_gguf(read_gguf_header(files.location))
    else:
        path = files.location / CONFIG_FILE
        config = config_from_json(read_json(path), path)
    config.check(files.location)
    return config
