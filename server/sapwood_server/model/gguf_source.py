"""Tensors of a GGUF file, dequantised once, under Hugging Face's names and in its row order."""

from __future__ import annotations

import math
import re

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from sapwood_server.errors import StartupError
from sapwood_server.formats.gguf_metadata import GgufHeader, GgufTensor
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.config_gguf import ROPE_FACTORS_TENSOR
from sapwood_server.model.gguf_blocks import unpack_q4
from sapwood_server.model.matrix import PackedQ4
from sapwood_server.model.tensor_errors import missing_tensor, unused_tensors, wrong_shape
from sapwood_server.quoting import quote

ACCEPTED_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)
PACKED_TYPES = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1)
"""Types whose integers are kept if asked for."""

_TOP_LEVEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_CHUNK_ELEMENTS = 2**23
"""Values dequantised at a time: 32 MiB in fp32, whatever the size of the tensor."""


class GgufSource:
    """Reads each tensor once. `close` raises StartupError if one was left."""

    def __init__(self, header: GgufHeader, config: ModelConfig, keep_packed: bool) -> None:
        self._header = header
        self._config = config
        self._keep_packed = keep_packed
        self._unused: dict[str, GgufTensor] = {tensor.name: tensor for tensor in header.tensors}
        if config.rope_scaling is not None and config.rope_scaling.kind == "factors":
            del self._unused[ROPE_FACTORS_TENSOR]  # read with the configuration

    def fill(self, name: str, out: Tensor) -> PackedQ4 | None:
        """Writes tensor `name` (Hugging Face's) to `out`, whose shape it must have, rounded to its dtype.

        Returns the integers behind it if they are to be kept and it is Q4_0 or Q4_1. StartupError if the tensor is
        missing, misshapen, cut short, or of a type that is not accepted.
        """
        tensor = self._take(name)
        if tensor.shape != tuple(out.shape):
            raise wrong_shape(self._header.path, tensor.name, tensor.shape, tuple(out.shape))
        kind, rows = self._raw_rows(tensor)
        if self._is_permuted(name):
            rows = _half_split_order(rows, self._config.head_dim)
        _dequantise(rows, kind, out.view(-1, out.shape[-1]))
        if not self._keep_packed or kind not in PACKED_TYPES:
            return None
        return unpack_q4(rows, has_minimum=kind == GGMLQuantizationType.Q4_1)

    def close(self) -> None:
        """StartupError that names tensors nothing has asked for."""
        if self._unused:
            raise unused_tensors(self._header.path, list(self._unused))

    def _take(self, name: str) -> GgufTensor:
        stored = gguf_name(name)
        tensor = self._unused.pop(stored, None)
        if tensor is None:
            raise missing_tensor(self._header.path, stored)
        return tensor

    def _raw_rows(self, tensor: GgufTensor) -> tuple[GGMLQuantizationType, npt.NDArray[np.uint8]]:
        """The tensor's type and its bytes, one row of the matrix each."""
        path = self._header.path
        kind = next((known for known in ACCEPTED_TYPES if known == tensor.type_code), None)
        if kind is None:
            accepted = ", ".join(known.name for known in ACCEPTED_TYPES)
            raise StartupError(
                f"{path}: tensor {quote(tensor.name)} is {_type_name(tensor.type_code)} (accepted: {accepted})"
            )
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        columns = tensor.shape[-1]
        if columns % block_size:
            raise StartupError(
                f"{path}: tensor {quote(tensor.name)} has {columns} columns; {kind.name} wants blocks of {block_size}"
            )
        row_bytes = columns // block_size * block_bytes
        num_rows = math.prod(tensor.shape[:-1])
        end = tensor.offset + num_rows * row_bytes
        if end > self._header.file_size:
            raise StartupError(
                f"{path}: cut short: tensor {quote(tensor.name)} ends at byte {end} of {self._header.file_size}"
            )
        data = np.fromfile(path, dtype=np.uint8, count=num_rows * row_bytes, offset=tensor.offset)
        return kind, data.reshape(num_rows, row_bytes)

    def _is_permuted(self, name: str) -> bool:
        """llama.cpp interleaves the two halves of each rotated head, for architecture llama only."""
        return self._config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))


def num_packed_parameters(header: GgufHeader) -> int:
    """Elements of the matrices whose integers can be kept."""
    return sum(math.prod(tensor.shape) for tensor in header.tensors if tensor.type_code in PACKED_TYPES)


def gguf_name(name: str) -> str:
    """llama.cpp's name for a tensor of Hugging Face's: `model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    layer = _LAYER_NAME.fullmatch(name)
    return f"blk.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}" if layer else _TOP_LEVEL[name]


def _half_split_order(rows: npt.NDArray[np.uint8], head_dim: int) -> npt.NDArray[np.uint8]:
    """Rows of each head in the order `0, 2, 4, ..., 1, 3, 5, ...`: pairs that rotate together lie half a head apart."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _dequantise(rows: npt.NDArray[np.uint8], kind: GGMLQuantizationType, out: Tensor) -> None:
    """Bytes of N rows to `out` [N, K], some rows at a time: no second copy of a large tensor in fp32."""
    step = max(1, _CHUNK_ELEMENTS // out.shape[-1])
    for start in range(0, out.shape[0], step):
        values = gguf.quants.dequantize(rows[start : start + step], kind)
        out[start : start + step].copy_(torch.from_numpy(values))


def _type_name(type_code: int) -> str:
    try:
        return GGMLQuantizationType(type_code).name
    except ValueError:
        return f"of unknown type {type_code}"
