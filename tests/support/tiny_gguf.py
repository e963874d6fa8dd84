"""The same random models as GGUF files, in any accepted quantisation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from torch import Tensor

from support.tiny_models import (
    CHAT_TEMPLATE,
    END_ID,
    SPECIAL_TOKENS,
    byte_level_tokenizer,
    random_tensors,
    tiny_config,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
} | {
    f"self_attn.{letter}_{part}": f"attn_{letter}{'' if part == 'proj' else '_norm'}"
    for letter in "qkv"
    for part in ("proj", "norm")
}
_HALF_FIELDS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the half-precision scales of a block lie, in bytes."""


def make_tiny_gguf(
    path: Path,
    architecture: str = "llama",
    quantisation: str = "F32",
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    metadata: Mapping[str, float | int | str] | None = None,
    rope_factors: tuple[float, ...] = (),
) -> dict[str, Tensor]:
    """Writes `path` and returns the values that its tensors stand for, fp32, by Hugging Face's name and in its order.

    Norms and biases are F32 as in real files; all else is of type `quantisation`. `overrides` are keys of config.json
    (the K types need row lengths that 256 divides), `metadata` further GGUF keys without the architecture's prefix.
    """
    config = tiny_config(architecture, 320, 512) | dict(overrides or {})
    writer = gguf.GGUFWriter(path, architecture)
    add_hyperparameters(writer, config, metadata or {})
    add_byte_level_vocabulary(writer, config["vocab_size"])
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    written: dict[str, Tensor] = {}
    for name, tensor in random_tensors(config, seed).items():
        values = tensor.numpy()
        kind = GGMLQuantizationType.F32 if values.ndim == 1 else GGMLQuantizationType[quantisation]
        rotated = architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight"))
        raw = quantised(interleaved(values, config["head_dim"]) if rotated else values, kind, seed)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        stands_for = gguf.quants.dequantize(raw, kind).reshape(values.shape)
        written[name] = tensor.new_tensor(half_split(stands_for, config["head_dim"]) if rotated else stands_for)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def add_hyperparameters(
    writer: gguf.GGUFWriter, config: Mapping[str, Any], more: Mapping[str, float | int | str]
) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if key not in more:
            writer.add_uint32(f"{writer.arch}.{key}", config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key, value in more.items():
        name = f"{writer.arch}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)


def add_byte_level_vocabulary(writer: gguf.GGUFWriter, vocab_size: int, pre: str = "gpt-2") -> None:
    """The tiny models' tokenizer, padded to `vocab_size` with unused tokens as llama.cpp's converter does."""
    tokenizer = byte_level_tokenizer(vocab_size - 8)
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=lambda token: ids[token])
    types = [CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tokens]
    padding = [f"[PAD{id_}]" for id_ in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *padding])
    writer.add_token_types([*types, *([UNUSED] * len(padding))])
    writer.add_token_merges([" ".join(pair) for pair in merges_of(tokenizer.to_str())])
    writer.add_eos_token_id(END_ID)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def merges_of(tokenizer_json: str) -> list[list[str]]:
    """The merges in a serialised BPE tokenizer."""
    merges: list[list[str]] = json.loads(tokenizer_json)["model"]["merges"]
    return merges


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor, spelled out apart from the code under test."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{_NAMES[rest]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def interleaved(values: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """llama.cpp's row order: row `i` of a head, then row `i + head_dim / 2`."""
    order = [half * (head_dim // 2) + pair for pair in range(head_dim // 2) for half in (0, 1)]
    heads = values.reshape(-1, head_dim, values.shape[-1])
    return np.ascontiguousarray(heads[:, order].reshape(values.shape))


def half_split(values: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """The inverse of `interleaved`."""
    order = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    heads = values.reshape(-1, head_dim, values.shape[-1])
    return np.ascontiguousarray(heads[:, order].reshape(values.shape))


def quantised(values: npt.NDArray[np.float32], kind: GGMLQuantizationType, seed: int) -> npt.NDArray[Any]:
    """The values in the type's blocks; for the K types, which the package can't make, random blocks of that shape."""
    if kind.name not in _HALF_FIELDS:
        blocks: npt.NDArray[Any] = gguf.quants.quantize(values, kind)
        return blocks
    random_ = np.random.default_rng(seed)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = random_.integers(0, 256, (values.shape[0], values.shape[1] // block_size, block_bytes), dtype=np.uint8)
    for start in _HALF_FIELDS[kind.name]:
        scales = random_.uniform(0.0001, 0.001, raw.shape[:2]).astype(np.float16)
        raw[:, :, start : start + 2] = scales[:, :, None].view(np.uint8)
    return raw.reshape(values.shape[0], -1)
