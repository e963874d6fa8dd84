"""Random models of a few thousand weights, in Hugging Face's layout, with a working tokenizer and a chat template.

Written without transformers (importing it takes seconds), in a form that transformers loads as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2. The end token is the last one."""
END_ID = 2
PADDING_IDS = 8
"""The last ids of a tiny model's vocabulary that no token has, as real models have some."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A page of memory holds sixteen tokens; a prefix that is shared is computed once.",
    "user system assistant hello world how are you today I am fine thank you",
    "def main():\n    return 0\n\nfor index in range(10):\n    print(index)\n",
)


def make_tiny_model(
    path: Path,
    architecture: str = "llama",
    vocab_size: int = 320,
    max_position_embeddings: int = 512,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the model's folder and returns it. `overrides` are further keys of config.json.

    Hidden 32, 2 layers, 4 heads, 2 key-value heads of 8 (Qwen3: 16) dimensions. `vocab_size` is at least 267: all
    bytes, three special tokens, eight ids of padding; what is above becomes merges.
    """
    config = tiny_config(architecture, vocab_size, max_position_embeddings) | dict(overrides or {})
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer(vocab_size - PADDING_IDS)
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"eos_token_id": [END_ID]})
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": SPECIAL_TOKENS[END_ID],
            "pad_token": SPECIAL_TOKENS[0],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    save_file(random_tensors(config, seed), path / "model.safetensors", metadata={"format": "pt"})
    return path


def tiny_config(architecture: str, vocab_size: int, max_position_embeddings: int) -> dict[str, Any]:
    """A config.json as transformers 5 writes it."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16 if architecture == "qwen3" else 8,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    return config | ({"sliding_window": None} if architecture == "mistral" else {})


def random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """fp32 tensors by name. Scaled so that logits spread over several units: no greedy choice hangs on rounding."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1.0 + 0.1 * noise
        elif name.endswith("bias"):
            tensors[name] = 0.5 * noise
        else:
            tensors[name] = noise * (3.0 if name == "lm_head.weight" else 1.5) / math.sqrt(shape[-1])
    return tensors


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, in Hugging Face's names."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for letter, count in heads.items():
            shapes[f"{prefix}self_attn.{letter}_proj.weight"] = (count * head_dim, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{letter}_proj.bias"] = (count * head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, heads["q"] * head_dim)
        if config["model_type"] == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[prefix + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def byte_level_tokenizer(num_tokens: int) -> Tokenizer:
    """Byte-level BPE of at most `num_tokens` tokens: special ones, all bytes, merges from a few fixed lines."""
    if num_tokens < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"num_tokens is {num_tokens}; expected at least {256 + len(SPECIAL_TOKENS)}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=1,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
