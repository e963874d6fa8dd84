"""A GPU's memory, shared out before a weight is read: weights, what a step needs besides, and KV pages get the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sapwood_kernels.partials import MAX_BYTES
from sapwood_server.errors import StartupError
from sapwood_server.model.config import ModelConfig

LIBRARY_BYTES = 512 * 2**20
"""What cuBLAS, loaded kernels and gaps between blocks may take. A guess, to be measured on a GPU."""
LOGPROB_ROWS = 16
"""Rows whose log-probabilities are ranked at a time: a sort of them takes several times what they take."""
_SORT_BYTES = 32
"""Of each element that is ranked: its value and its 64-bit id, twice. A guess, to be measured."""
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The most that a step may hold."""

    num_tokens: int
    num_sequences: int
    """Sequences that decode; also samples."""
    max_model_len: int
    split_size: int | None
    """Of the decode kernel, in tokens; None: decode rows take the prefill kernel."""

    @property
    def max_splits(self) -> int:
        """Splits of the longest sequence."""
        return 0 if self.split_size is None else -(-self.max_model_len // self.split_size)


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """What CUDA says of one GPU, in bytes."""

    total: int
    free: int


def step_bytes(config: ModelConfig, dtype: torch.dtype, sizes: StepSizes) -> int:
    """Bytes that a step takes beside weights and pages: the sum of four parts, each as large as it gets.

    Activations of one layer (of two runs: the graphs of decode steps hold a second set); logits, as the head gives
    them, in fp32, in the graphs' own buffer, and twice more for what sampling makes of them, and the ranking of some;
    partial results of split decode attention; rotary table and block tables. StartupError for more partial results
    than kernels take.
    """
    num_heads, head_dim = config.num_heads, config.head_dim
    # qkv; then queries, what the two phases attended to, and that joined.
    qkv = (4 * num_heads + 2 * config.num_kv_heads) * head_dim
    per_token = config.hidden_size * (_FP32 + 3 * dtype.itemsize)
    per_token += (qkv + 3 * config.intermediate_size) * dtype.itemsize
    activations = (sizes.num_tokens + sizes.num_sequences) * per_token
    logits = sizes.num_sequences * config.vocab_size * (dtype.itemsize + 4 * _FP32)
    logits += LOGPROB_ROWS * config.vocab_size * _SORT_BYTES
    partials = sizes.num_sequences * sizes.max_splits * num_heads * (head_dim + 2) * _FP32
    if partials > MAX_BYTES:
        raise StartupError(
            f"{sizes.num_sequences} sequences of {sizes.max_model_len} tokens may leave {partials} bytes of partial "
            f"results in a decode step (accepted: up to {MAX_BYTES}; lower --max-num-seqs or --max-model-len)"
        )
    tables = sizes.max_model_len * head_dim * _FP32 + 2 * sizes.num_sequences * sizes.max_model_len
    return activations + logits + partials + tables


def gpu_kv_memory(memory: GpuMemory, utilization: float, weights: int, step: int) -> int:
    """Bytes for pages when nobody stated them: the share `utilization` of the whole memory, less what is in use before
    we start, less weights, step and libraries. StartupError, with both numbers, if nothing is left."""
    budget = int(memory.total * utilization) - (memory.total - memory.free)
    left = budget - weights - step - LIBRARY_BYTES
    if left <= 0:
        raise StartupError(
            f"the model's weights take {weights} bytes and a step {step + LIBRARY_BYTES} bytes, but "
            f"--gpu-memory-utilization {utilization} leaves {max(budget, 0)} bytes of {memory.total} (lower "
            "--max-batched-tokens, --max-num-seqs or --max-model-len, or raise the share)"
        )
    return left


def check_gpu_memory(memory: GpuMemory, kv: int, weights: int, step: int) -> None:
    """StartupError, with both numbers, if stated pages don't fit beside the rest."""
    needed = weights + step + LIBRARY_BYTES + kv
    if needed > memory.free:
        raise StartupError(
            f"weights, a step and --kv-memory take {weights} + {step + LIBRARY_BYTES} + {kv} = {needed} bytes, but "
            f"{memory.free} bytes of the GPU's memory are free (lower --kv-memory)"
        )


def read_gpu_memory(device: torch.device) -> GpuMemory:
    """Of a CUDA device, now."""
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total=total, free=free)
