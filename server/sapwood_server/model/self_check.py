"""`--deterministic` is tried on this machine before it is promised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sapwood_server.errors import StartupError
from sapwood_server.model.devices import DeviceKind
from sapwood_server.model.runner import ModelRunner
from sapwood_server.values.messages import EngineInfo
from sapwood_server.values.plan import Phase, RowPlan, StepPlan

_NUM_TOKENS = 20
"""More than a block of 16 rows."""
_CHUNKS = (1, 3, _NUM_TOKENS)
"""The last one as long as what is left."""
_GPU_CHUNKS = (1, 3, 17, 65, 129, 513)
"""Before what is left: numbers of rows for which cuBLAS chooses among its kernels differently."""
_SEQUENCE_ID = -1


def check_deterministic_runner(runner: ModelRunner) -> None:
    """Some tokens in one chunk, in several, and the last by a decode step: StartupError if one logit has other bits.

    A product whose sums follow the number of rows shows here, whatever this machine and this torch make of it; the
    tests know one machine. On a GPU also the pages that a step of the most tokens leaves.
    """
    info = runner.info
    num_tokens = min(_NUM_TOKENS, info.max_model_len, info.max_batched_tokens, _room(info))
    whole = _logits(runner, num_tokens, (num_tokens,))
    if not torch.equal(whole, _logits(runner, num_tokens, _CHUNKS)):
        raise _refusal(info, f"{num_tokens} tokens in chunks of {', '.join(map(str, _CHUNKS[:-1]))} and the rest")
    if num_tokens > 1:
        decoded = _logits(runner, num_tokens, (num_tokens - 1, 1), decode=True)
        if not torch.equal(whole[-1:], decoded[-1:]):
            raise _refusal(info, "a decode step")
    if info.device == DeviceKind.CUDA.value:
        check_pages(runner, _GPU_CHUNKS)


def check_pages(runner: ModelRunner, chunks: Sequence[int]) -> None:
    """As many tokens as a step may have, twice: in one chunk, and in `chunks` and what is left. StartupError if a page
    has other bits. (Pages, since the logits of so many tokens would not fit in memory.)"""
    info = runner.info
    page_size = info.page_size
    num_tokens = min(info.max_batched_tokens, info.max_model_len, _room(info) // 2 // page_size * page_size)
    num_pages = -(-num_tokens // page_size)
    for first_page, sizes in ((1, (num_tokens,)), (1 + num_pages, (*chunks, num_tokens))):
        for row in _rows(info, num_tokens, sizes, first_page):
            runner.execute(StepPlan(step=-1, rows=(row,)))
        _release(runner)
    for page in range(1, 1 + num_pages):
        used = min(page_size, num_tokens - (page - 1) * page_size)
        mine, other = (runner.kv_pages(one)[..., :used, :] for one in (page, page + num_pages))
        if not torch.equal(mine, other):
            raise _refusal(info, f"{num_tokens} tokens in chunks of {', '.join(map(str, chunks))} and the rest")


def _room(info: EngineInfo) -> int:
    return (info.num_pages - 1) * info.page_size


def _refusal(info: EngineInfo, comparison: str) -> StartupError:
    return StartupError(
        f"--deterministic: in {info.dtype} on this {info.device} logits depend on how a prompt is chunked: "
        f"{comparison} gave other bits than one chunk (accepted: another --dtype, or --no-deterministic)"
    )


def _logits(runner: ModelRunner, num_tokens: int, chunks: Sequence[int], *, decode: bool = False) -> Tensor:
    """Of every token: [num_tokens, vocab_size]. With `decode`, the last chunk is a decode row."""
    rows = _rows(runner.info, num_tokens, chunks, first_page=1)
    if decode:
        last = rows[-1]
        rows[-1] = RowPlan(
            sequence_id=last.sequence_id,
            token_ids=last.token_ids,
            start=last.start,
            phase=Phase.DECODE,
            new_pages=last.new_pages,
        )
    parts = [logits for row in rows for logits in runner.token_logits(StepPlan(step=-1, rows=(row,)))]
    _release(runner)
    return torch.cat(parts)


def _rows(info: EngineInfo, num_tokens: int, chunks: Sequence[int], first_page: int) -> list[RowPlan]:
    """The same tokens in chunks, the last one as long as what is left, in consecutive pages."""
    rows = []
    start = covered = 0
    for size in chunks:
        end = min(start + size, num_tokens)
        needed = -(-end // info.page_size)
        if end > start:
            rows.append(
                RowPlan(
                    sequence_id=_SEQUENCE_ID,
                    token_ids=[(31 * position + 7) % info.vocab_size for position in range(start, end)],
                    start=start,
                    phase=Phase.PREFILL,
                    new_pages=range(first_page + covered, first_page + needed),
                )
            )
        start, covered = end, needed
    return rows


def _release(runner: ModelRunner) -> None:
    runner.execute(StepPlan(step=-1, rows=(), released=(_SEQUENCE_ID,)))
