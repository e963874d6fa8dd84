"""`python -m sapwood_bench.transformers_peer MODEL ROUNDS TOKENS`: transformers' `generate` on the same weights.

Prints JSON. A process of its own: its imports take seconds, and its memory is given back at the end. The weights are
float32, dequantised as the server dequantises them; attention and KV cache are transformers' own defaults.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from sapwood_bench.workload import PromptMaker
from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.weights import ModelWeights, WeightPlacement, load_weights
from sapwood_server.quoting import quote

PROMPT_LENGTHS = (3019, 100, 3000)
"""Prefill, short context, long context: as `sapwood_bench.peers` asks of the servers."""


class ArrivalTimes(BaseStreamer):
    """Notes when each token is known; `generate` puts the prompt first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to be noted."""


def main(model_name: str, rounds: int, max_tokens: int) -> dict[str, float]:
    """Medians in tokens per second; a first round is dropped."""
    model = load(model_name)
    maker = PromptMaker(model_name, seed=15)
    measured: list[tuple[float, float, float]] = []
    for _ in range(rounds + 1):
        prefill, short, long = (maker.prompt(length) for length in PROMPT_LENGTHS)
        ttft, _ = timed(model, prefill, 2)
        measured.append((len(prefill) / ttft, timed(model, short, max_tokens)[1], timed(model, long, max_tokens)[1]))
    medians = [statistics.median(column) for column in zip(*measured[1:], strict=True)]
    return dict(zip(("prefill", "decode_short", "decode_long"), medians, strict=True))


def timed(model: transformers.LlamaForCausalLM, prompt: Sequence[int], max_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and tokens per second after it."""
    arrivals = ArrivalTimes()
    ids = torch.tensor([prompt])
    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        streamer=arrivals,
    )
    first, last = arrivals.seconds[1], arrivals.seconds[-1]
    return first - started, (max_tokens - 1) / (last - first)


def load(model_name: str) -> transformers.LlamaForCausalLM:
    """transformers' Llama with the server's own dequantised weights. Raises StartupError for another architecture."""
    files = resolve_model(model_name)
    config = load_model_config(files)
    if config.architecture != "llama" or config.rope_scaling is not None:
        raise StartupError(f"{model_name} is {quote(config.architecture)}; this peer runs plain llama models only")
    weights = load_weights(files, config, WeightPlacement(torch.float32, torch.device("cpu")), lambda _fraction: None)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
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
            dtype=torch.float32,
        )
    )
    model.train(False)
    model.load_state_dict(state_dict(weights, config), strict=True, assign=True)
    return model


def state_dict(weights: ModelWeights, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Our merged matrices under transformers' names."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.lm_head.dense,
    }
    for index, layer in enumerate(weights.layers):
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        qkv = layer.qkv.dense
        parts = (qkv[:q], qkv[q : q + kv], qkv[q + kv :], *layer.gate_up.dense.chunk(2))
        whole = {
            "self_attn.o_proj": layer.o.dense,
            "mlp.down_proj": layer.down.dense,
            "input_layernorm": layer.input_norm,
            "post_attention_layernorm": layer.post_attention_norm,
        }
        for name, tensor in (*zip(names, parts, strict=True), *whole.items()):
            state[f"model.layers.{index}.{name}.weight"] = tensor
    return state


if __name__ == "__main__":
    name, rounds, max_tokens = sys.argv[1:]
    sys.stdout.write(json.dumps(main(name, int(rounds), int(max_tokens))) + "\n")
