"""Which graphs there are and which one a batch takes. (What CUDA captures is checked on a GPU.)"""

from __future__ import annotations

import pytest

from sapwood_server.model.cuda_graphs import DecodeGraphs, Run, decode_buckets


@pytest.mark.parametrize(
    ("max_rows", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (130, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 130)),
    ],
)
def test_buckets(max_rows: int, buckets: tuple[int, ...]) -> None:
    assert decode_buckets(max_rows) == buckets


def test_the_largest_batches_run_without_a_graph() -> None:
    buckets = decode_buckets(4096)
    assert buckets == decode_buckets(512)
    assert buckets[-1] == 512


class Recorder:
    """Runs that note their batch, and a capture that repeats them."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    def run_of(self, bucket: int) -> Run:
        return lambda: self.ran.append(bucket)

    def capture(self, run: Run) -> Run:
        run()
        return run


def test_each_bucket_is_captured_once_the_largest_first() -> None:
    recorder = Recorder()
    graphs = DecodeGraphs((1, 2, 4, 8), recorder.capture)
    assert graphs.bucket(1) is None, "nothing is captured yet"
    graphs.capture(recorder.run_of)
    assert recorder.ran == [8, 4, 2, 1]
    graphs.replay(4)
    assert recorder.ran[4:] == [4]


def test_a_batch_takes_the_smallest_bucket_with_room_for_it() -> None:
    recorder = Recorder()
    graphs = DecodeGraphs(decode_buckets(20), recorder.capture)
    graphs.capture(recorder.run_of)
    assert graphs.max_rows == 20
    assert [graphs.bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 20)] == [1, 2, 4, 4, 8, 8, 16, 20, 20]
    assert graphs.bucket(21) is None
