"""CUDA graphs of decode steps: one launch in place of some hundreds, for batches padded to one of a few sizes."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import torch

Run = Callable[[], None]

_SMALL_BUCKETS = (1, 2, 4)
_BUCKET_STEP = 8
_WIDE_FROM = 64
_WIDE_BUCKET_STEP = 32
"""Above 64 rows a row more costs little, and each graph takes time to capture: a guess, to be measured."""
_MOST_ROWS = 512
"""Batches above it run kernel by kernel: their kernels take longer than their launches. A guess, to be measured."""


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending: 1, 2, 4, multiples of 8 up to 64, multiples of 32, and `max_rows` itself, or
    512 if that is less."""
    max_rows = min(max_rows, _MOST_ROWS)
    narrow = range(_BUCKET_STEP, min(max_rows, _WIDE_FROM) + 1, _BUCKET_STEP)
    wide = range(_WIDE_FROM + _WIDE_BUCKET_STEP, max_rows + 1, _WIDE_BUCKET_STEP)
    return tuple(sorted({size for size in (*_SMALL_BUCKETS, *narrow, *wide, max_rows) if size <= max_rows}))


class DecodeGraphs:
    """What was captured, by the number of rows."""

    def __init__(self, buckets: Sequence[int], capture: Callable[[Run], Run]) -> None:
        """`capture(run)` calls `run` and returns what does the same again: `cuda_capture`."""
        self._buckets = tuple(sorted(buckets))
        self._capture = capture
        self._replays: dict[int, Run] = {}

    @property
    def max_rows(self) -> int:
        """Of the largest batch that is captured."""
        return self._buckets[-1]

    def capture(self, run_of: Callable[[int], Run]) -> None:
        """Captures `run_of(bucket)` for each bucket, the largest first: smaller ones then find room in its memory."""
        for bucket in reversed(self._buckets):
            self._replays[bucket] = self._capture(run_of(bucket))

    def bucket(self, num_rows: int) -> int | None:
        """The smallest captured batch that has room for `num_rows`; None if there is none."""
        index = bisect.bisect_left(self._buckets, num_rows)
        if not self._replays or index == len(self._buckets):
            return None
        return self._buckets[index]

    def replay(self, bucket: int) -> None:
        """Runs what was captured."""
        self._replays[bucket]()


def cuda_capture() -> Callable[[Run], Run]:
    """A capture for DecodeGraphs whose graphs share one pool of memory: they never run at once."""
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(run: Run) -> Run:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compiles what is new, which can't be captured, and has cuBLAS take its workspace for this stream
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            run()
        return graph.replay

    return capture
