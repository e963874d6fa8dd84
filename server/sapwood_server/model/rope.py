"""Rotary position embedding: the angles of each position, under every scaling that the configuration may ask for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sapwood_server.model.config import ModelConfig, RopeScaling


def rotary_table(config: ModelConfig, num_positions: int) -> Tensor:
    """cos_sin fp32 [num_positions, head_dim]: for each position the cosines of its head_dim / 2 angles, then the sines.

    Angle i of position p is `p * frequency[i]`; both halves carry yarn's attention factor.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, rotary_frequencies(config))
    factor = config.rope_scaling.attention_factor if config.rope_scaling else None
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * (1.0 if factor is None else factor)


def rotary_bytes(config: ModelConfig, num_positions: int) -> int:
    """Memory of such a table."""
    return num_positions * config.head_dim * torch.float32.itemsize


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """fp32 [head_dim / 2], radians per position: `theta ** (-2i / head_dim)` (Su et al., 2021), then the scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor
        case "llama3":
            return _llama3(frequencies, scaling)
        case "yarn":
            return _yarn(frequencies, scaling, config)
        case "factors":
            return frequencies / torch.tensor(_stated(scaling, "factors"), dtype=torch.float32)


def rotation_matrices(cos_sin: Tensor) -> Tensor:
    """The same rotations as matrices, `x @ matrix`: fp32 [num_tokens, head_dim, head_dim] of [num_tokens, head_dim]."""
    half = cos_sin.shape[1] // 2
    matrices = cos_sin.new_zeros(cos_sin.shape[0], 2, half, 2, half)
    cos, sin = cos_sin[:, :half], cos_sin[:, half:]
    for row, column, values in ((0, 0, cos), (0, 1, sin), (1, 0, -sin), (1, 1, cos)):
        matrices[:, row, :, column].diagonal(dim1=1, dim2=2).copy_(values)
    return matrices.view(cos_sin.shape[0], 2 * half, 2 * half)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: wavelengths under `context / high_freq_factor` are kept, those over `context / low_freq_factor` are
    stretched by `factor`, those between are blended."""
    low, high = _stated(scaling, "low_freq_factor"), _stated(scaling, "high_freq_factor")
    turns = frequencies * _stated(scaling, "original_max_position_embeddings") / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """Peng et al., 2023, "NTK-by-parts": a ramp over dimensions, from those that turn `beta_fast` times within the
    original context and are kept, to those that turn `beta_slow` times and are stretched by `factor`."""
    first = _dimension_of_turns(_stated(scaling, "beta_fast"), scaling, config)
    last = _dimension_of_turns(_stated(scaling, "beta_slow"), scaling, config)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    span = max(last - first, 0.001)
    dimensions = torch.arange(config.head_dim // 2, dtype=torch.float32)
    kept = 1 - ((dimensions - first) / span).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _dimension_of_turns(turns: float, scaling: RopeScaling, config: ModelConfig) -> float:
    """The (fractional) dimension pair that makes `turns` full turns within the original context."""
    context = _stated(scaling, "original_max_position_embeddings")
    return config.head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))


def _stated(scaling: RopeScaling, name: str) -> float:
    value = getattr(scaling, name)
    if value is None:
        raise ValueError(f"rope scaling {scaling.kind!r} has no {name!r}")
    return value  # type: ignore[no-any-return]
