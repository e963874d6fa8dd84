"""`python -m sapwood_bench.transformers_peer MODEL`: transformers' `generate` on the same weights.

Reads `{"prompt": ids, "max_tokens": number}` a line, and answers each with a line of `client.Timed`'s fields, until its
input ends. A process of its own: the command's own must not import torch. The weights are float32, dequantised as the
server dequantises them; attention and KV cache are transformers' own defaults.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from sapwood_bench.client import Timed
from sapwood_server.errors import StartupError
from sapwood_server.formats.model_files import resolve_model
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.config_files import load_model_config
from sapwood_server.model.weights import ModelWeights, WeightPlacement, load_weights
from sapwood_server.quoting import quote


class ArrivalTimes(BaseStreamer):
    """Notes when each token is known; `generate` puts the prompt first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to be noted."""


def answers(model_name: str, lines: Iterable[str]) -> Iterator[str]:
    """A line for each line; the model is loaded before the first is read."""
    model = load(model_name)
    for line in lines:
        request = json.loads(line)
        yield json.dumps(asdict(timed(model, request["prompt"], request["max_tokens"])))


def timed(model: transformers.LlamaForCausalLM, prompt: Sequence[int], max_tokens: int) -> Timed:
    """A greedy completion of exactly `max_tokens` tokens."""
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
    return Timed(
        text="",
        ttft_seconds=first - started,
        decode_seconds=last - first,
        prompt_tokens=len(prompt),
        cached_tokens=0,
        completion_tokens=max_tokens,
    )


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
    for answer in answers(sys.argv[1], sys.stdin):
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
