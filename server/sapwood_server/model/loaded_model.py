"""A model that was read: its shape and its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sapwood_server.model.config import ModelConfig
from sapwood_server.model.linear import LinearForms
from sapwood_server.model.weights import ModelWeights


@dataclass(frozen=True)
class Model:
    """A loaded model."""

    config: ModelConfig
    weights: ModelWeights
    forms: LinearForms
    """Of weights, that linears may take. All but plain ones need bf16."""
    num_tokens: int
    """Ids from here on are padding of the vocabulary, never drawn."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, of what linears take and give, and of KV pages."""
        return self.weights.embedding.dtype
