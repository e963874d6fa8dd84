"""transformers' own model over a tiny folder: the oracle for logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def oracle_logits(folder: Path, token_ids: Sequence[int]) -> Tensor:
    """fp32 logits of every token, [len(token_ids), vocab_size]."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits
