"""Computes parts of a micro-batch in parallel threads (lanes), to use several cores of a CPU.

    TrainBatch -> split -> forward and backward of each part in its lane -> gradients, in lane order

torch releases the GIL while it computes, so lanes run in parallel and never wait for each other
inside an operation. The threads of one operation do wait for each other, which on a busy machine or
with small matrices costs more than a second thread gains. Weights are shared. Each lane has its own
gradients, which are added in the order of the lanes, so that the result does not depend on which
lane finishes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import torch

from homeostat.types import TrainBatch

T = TypeVar("T")
R = TypeVar("R")


class Lanes:
    """`count` threads, of which the caller's is the first."""

    def __init__(self, count: int, *, threads: int) -> None:
        assert count >= 2, count
        self.count = count
        self._pool = ThreadPoolExecutor(
            count - 1, thread_name_prefix="lane", initializer=_as_the_caller, initargs=(threads,)
        )

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the results in order. If one lane fails, its error is raised after the others have
        ended.
        """
        assert 1 <= len(items) <= self.count, (len(items), self.count)
        others = [self._pool.submit(work, item) for item in items[1:]]
        try:
            first = work(items[0])
        finally:
            wait(others)
        return [first, *(other.result() for other in others)]

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def split(batch: TrainBatch, count: int, *, rows_per_example: int = 1) -> list[TrainBatch]:
    """Runs of neighbouring rows with about as many tokens each, at most `count` of them.

    Rows stay in order: a group stands together, except for the one that a cut goes through. No cut
    goes through the rows of an example.
    """
    num_examples = batch.num_rows // rows_per_example
    count = min(count, num_examples)
    if count == 1:
        return [batch]
    ends = np.cumsum(batch.lengths_B)[rows_per_example - 1 :: rows_per_example]
    wanted = batch.num_tokens * np.arange(1, count) / count
    # Cut at the nearer of the two row ends; each part keeps at least one example.
    cuts = np.abs(ends[None] - wanted[:, None]).argmin(1) + 1
    cuts = (rows_per_example * np.unique(np.clip(cuts, 1, num_examples - 1))).tolist()
    rows = batch.rows()
    spans = zip([0, *cuts], [*cuts, batch.num_rows], strict=True)
    return [TrainBatch.of(rows[start:end]) for start, end in spans]


def _as_the_caller(threads: int) -> None:
    """Apply the caller's per-thread settings: number of threads and flushing of denormals."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
