"""Tensors of a folder's safetensors files, under the names they are stored by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import safetensors_files
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.tensor_errors import missing_tensor, unused_tensors, wrong_shape
from sapwood_server.quoting import quote, reason_of

ACCEPTED_TYPES = ("F32", "F16", "BF16")

_ROTARY_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_TIED_HEAD = "lm_head.weight"


class SafetensorsSource:
    """Reads each tensor once. `close` raises StartupError if one was left.

    Two are passed over, as transformers does: rotary frequencies that old checkpoints carry (computed from the
    configuration), and an `lm_head.weight` beside `tie_word_embeddings` (the embedding takes its place).
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._holders: dict[str, tuple[Path, Any]] = {}
        for path in safetensors_files(folder):
            for name, handle in self._open(path).items():
                if name in self._holders:
                    raise StartupError(f"{path}: tensor {quote(name)} is also in {self._holders[name][0].name}")
                self._holders[name] = (path, handle)
        self._unused = {name for name in self._holders if not _ROTARY_BUFFER.fullmatch(name)}
        if config.tie_word_embeddings:
            self._unused.discard(_TIED_HEAD)

    def _open(self, path: Path) -> Mapping[str, Any]:
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt"))
            return dict.fromkeys(handle.keys(), handle)
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{path}: not a whole safetensors file: {reason_of(error)}") from error

    def fill(self, name: str, out: Tensor) -> None:
        """Writes tensor `name` to `out`, whose shape it must have, rounded to its dtype. StartupError if the tensor is
        missing, misshapen or of a type that is not accepted."""
        if name not in self._unused:
            raise missing_tensor(self._folder, name)
        path, handle = self._holders[name]
        self._unused.remove(name)
        info = handle.get_slice(name)
        shape, kind = tuple(info.get_shape()), info.get_dtype()
        if shape != tuple(out.shape):
            raise wrong_shape(path, name, shape, tuple(out.shape))
        if kind not in ACCEPTED_TYPES:
            raise StartupError(f"{path}: tensor {quote(name)} is {kind} (accepted: {', '.join(ACCEPTED_TYPES)})")
        out.copy_(handle.get_tensor(name))

    def close(self) -> None:
        """Closes the files. StartupError that names tensors nothing has asked for."""
        self._stack.close()
        self._holders.clear()
        if self._unused:
            raise unused_tensors(self._folder, self._unused)
