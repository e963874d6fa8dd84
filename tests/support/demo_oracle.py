"""transformers' Llama over the demo model's dequantised weights: the same numbers, other code."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sapwood_server.model.config import ModelConfig
from sapwood_server.model.weights import ModelWeights


def llama_oracle(config: ModelConfig, weights: ModelWeights) -> LlamaForCausalLM:
    """The model, sharing the weights' memory."""
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(settings)
    model.train(False)
    model.load_state_dict(_state_dict(config, weights), assign=True, strict=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    return model


def _state_dict(config: ModelConfig, weights: ModelWeights) -> dict[str, Tensor]:
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.lm_head.dense,
    }
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(weights.layers):
        q, k, v = torch.split(layer.qkv.dense, [q_size, kv_size, kv_size])
        gate, up = torch.split(layer.gate_up.dense, [config.intermediate_size] * 2)
        prefix = f"model.layers.{index}."
        for name, tensor in (("q_proj", q), ("k_proj", k), ("v_proj", v), ("o_proj", layer.o.dense)):
            state[f"{prefix}self_attn.{name}.weight"] = tensor
        for name, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", layer.down.dense)):
            state[f"{prefix}mlp.{name}.weight"] = tensor
        state[f"{prefix}input_layernorm.weight"] = layer.input_norm
        state[f"{prefix}post_attention_layernorm.weight"] = layer.post_attention_norm
    return state
