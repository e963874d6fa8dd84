"""`--deterministic` is tried on this machine before it is promised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood_server.errors import StartupError
from sapwood_server.model.runner import ModelRunner
from sapwood_server.values.plan import Phase, RowPlan, StepPlan

_NUM_TOKENS = 20
"""More than a block of 16 rows."""
_CHUNKS = (1, 3, _NUM_TOKENS)
"""The last one as long as what is left."""
_SEQUENCE_ID = -1


def check_chunks(runner: ModelRunner) -> None:
    """Some tokens in one chunk and in several: StartupError if one logit has other bits.

    A product whose sums follow the number of rows shows here, whatever this CPU and this torch make of it; the tests
    know one machine.
    """
    info = runner.info
    room = (info.num_pages - 1) * info.page_size
    num_tokens = min(_NUM_TOKENS, info.max_model_len, info.max_batched_tokens, room)
    whole = _logits(runner, num_tokens, (num_tokens,))
    if not torch.equal(whole, _logits(runner, num_tokens, _CHUNKS)):
        raise StartupError(
            f"--deterministic: in {info.dtype} on this {info.device} logits depend on how a prompt is chunked "
            "(accepted: another --dtype, or --no-deterministic)"
        )


def _logits(runner: ModelRunner, num_tokens: int, chunks: Sequence[int]) -> Tensor:
    """Of every token: [num_tokens, vocab_size]."""
    info = runner.info
    parts: list[Tensor] = []
    start = covered = 0
    for size in chunks:
        end = min(start + size, num_tokens)
        needed = -(-end // info.page_size)
        if end > start:
            row = RowPlan(
                sequence_id=_SEQUENCE_ID,
                token_ids=[(31 * position + 7) % info.vocab_size for position in range(start, end)],
                start=start,
                phase=Phase.PREFILL,
                new_pages=range(covered + 1, needed + 1),
            )
            parts += runner.token_logits(StepPlan(step=-1, rows=(row,)))
        start, covered = end, needed
    runner.execute(StepPlan(step=-1, rows=(), released=(_SEQUENCE_ID,)))
    return torch.cat(parts)
