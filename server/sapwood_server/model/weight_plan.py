"""Which forms of a model's weights are made, and what memory they take: decided before one is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sapwood_server.errors import StartupError
from sapwood_server.model.config import ModelConfig
from sapwood_server.model.linear import PLAIN_FORMS, LinearForms, find_linear_forms
from sapwood_server.model.matrix import GROUP_SIZE


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """The forms that linears take, and bytes."""

    forms: LinearForms
    problems: tuple[str, ...]
    """Why forms that bf16 could have are left out."""
    num_bytes: int
    """Of all weights once the decoder stands."""
    peak_bytes: int
    """Of all that lies side by side while it is built: what was read, and what is made of it."""


def plan_weights(
    config: ModelConfig, dtype: torch.dtype, num_q4: int, available: int | None, *, deterministic: bool = False
) -> WeightPlan:
    """All forms that this torch has; plain weights alone where `available` bytes can't hold what the others need.

    `num_q4`: parameters that the checkpoint has in Q4_0 or Q4_1. `available` None: nobody knows. `deterministic`: one
    form for every number of rows. StartupError, with both numbers, if not even plain weights fit.
    """
    plain = replace(PLAIN_FORMS, fixed_rows=deterministic)
    forms, problems = find_linear_forms() if dtype == torch.bfloat16 else (plain, ())
    if deterministic:
        forms = replace(forms, int4=False, fixed_rows=True)
    num_bytes, peak_bytes = weight_bytes(config, dtype, num_q4, forms)
    if available is not None and peak_bytes > available and forms != plain:
        problems = (*problems, f"other forms take {peak_bytes} bytes while they are made, {available} are available")
        forms = plain
        num_bytes, peak_bytes = weight_bytes(config, dtype, num_q4, forms)
    if available is not None and peak_bytes > available:
        raise StartupError(
            f"the model's weights take {peak_bytes} bytes, but {available} bytes of memory are available"
        )
    return WeightPlan(forms=forms, problems=problems, num_bytes=num_bytes, peak_bytes=peak_bytes)


def plan_plain_weights(config: ModelConfig, dtype: torch.dtype) -> WeightPlan:
    """Plain weights, whether or not they fit."""
    num_bytes, peak_bytes = weight_bytes(config, dtype, 0, PLAIN_FORMS)
    return WeightPlan(forms=PLAIN_FORMS, problems=(), num_bytes=num_bytes, peak_bytes=peak_bytes)


def num_parameters(config: ModelConfig) -> int:
    """Elements of all matrices; norms and biases are left out, a thousandth of them at most."""
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * _layer_parameters(config) + embeddings


def weight_bytes(config: ModelConfig, dtype: torch.dtype, num_q4: int, forms: LinearForms) -> tuple[int, int]:
    """(once the decoder stands, while it is built). Blocked matrices replace those that were read, except for the
    embedding, of whose rows lookups are made; 4-bit ones come on top, for steps of more rows take the others."""
    read = num_parameters(config) * dtype.itemsize
    embedding = config.vocab_size * config.hidden_size * dtype.itemsize
    linears = config.num_layers * _layer_parameters(config) * dtype.itemsize + embedding
    int4 = _int4_bytes(num_q4) if forms.int4 else 0
    unpacked = _unpacked_bytes(num_q4) if forms.int4 else 0
    if forms.blocked:
        return embedding + linears + int4, read + unpacked + linears + int4
    return read + int4, read + unpacked + int4


def _layer_parameters(config: ModelConfig) -> int:
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.hidden_size * (attention + 3 * config.intermediate_size)


def _int4_bytes(num_weights: int) -> int:
    """See `linear.pack_int4`: half a byte a weight, and two bf16 numbers a group."""
    return num_weights // 2 + num_weights // GROUP_SIZE * 4


def _unpacked_bytes(num_weights: int) -> int:
    """See `matrix.PackedQ4`: a byte a weight, and two fp32 numbers a group."""
    return num_weights + num_weights // GROUP_SIZE * 8
