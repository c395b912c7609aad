"""Decoding steps as CUDA graphs: one per number of rows, captured when it is first needed.

A graph is the launches of a forward's step, replayed in one go: the host would take longer to
launch them than the device takes to run them. Rows are padded to the next of a few numbers, so
that there are few graphs. They hold no address of the cache, and weights are written in place: a
graph, once captured, serves until the engine is closed, or until layers change their precision.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Protocol

import torch

from homeostat.models.decoder import Decoder
from homeostat.rollout.native.cuda.places import places_of
from homeostat.rollout.native.cuda.state import DecodeState

_SMALL = (1, 2, 4, 8, 16)
_STRIDE = 32


def row_counts(max_rows: int) -> list[int]:
    """Numbers of rows that there are graphs for, the largest of them `max_rows`."""
    counts = [*_SMALL, *range(_STRIDE, max_rows, _STRIDE)]
    return [count for count in counts if count < max_rows] + [max_rows]


class Forward(Protocol):
    """The forward pass of a step: forward.py, or invariant.py for invariant numerics."""

    model: Decoder
    state: DecodeState

    @property
    def vocabulary(self) -> int: ...

    def refresh(self) -> bool:
        """Derive copies of weights that have changed; return whether steps are to be captured
        again, because they would be other ones."""
        ...

    def weights_changed(self) -> None:
        """Let the next `refresh` derive copies of the weights again."""
        ...

    def step(self, num_rows: int, *, is_cut: bool) -> None: ...


class Steps:
    """Runs steps over up to `max_rows` rows. Without graphs every step repeats the launches."""

    def __init__(self, forward: Forward, *, max_rows: int, with_graphs: bool) -> None:
        self.forward = forward
        self.counts = row_counts(max_rows)
        self.with_graphs = with_graphs
        self.warmup_s = 0.0
        # By the number of rows, and whether some of them are cut.
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = None
        self._places: tuple[int, ...] = ()

    def make_ready(self, num_rows: int, *, is_cut: bool) -> int:
        """The number of rows that a step over `num_rows` runs over; it is captured by now.

        What was loaded into the state before is lost where a graph had to be captured.
        """
        count = self.counts[bisect_left(self.counts, num_rows)]
        if self.with_graphs and (count, is_cut) not in self._graphs:
            started = time.perf_counter()
            self._graphs[count, is_cut] = self._captured(count, is_cut)
            self.warmup_s += time.perf_counter() - started
        return count

    def refresh(self) -> None:
        """Make the forward pass ready for the weights as they are now."""
        if self.forward.refresh():
            self._graphs.clear()
        places = places_of(self.forward.model)
        assert not self._graphs or places == self._places, "weights moved after steps were captured"
        self._places = places

    def run(self, count: int, num_steps: int, *, is_cut: bool) -> None:
        for _ in range(num_steps):
            if self.with_graphs:
                self._graphs[count, is_cut].replay()
            else:
                self.forward.step(count, is_cut=is_cut)

    def _captured(self, count: int, is_cut: bool) -> torch.cuda.CUDAGraph:
        self.forward.state.clear()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Compiles kernels and makes handles, neither of which can be captured.
            self.forward.step(count, is_cut=is_cut)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's work is captured: others may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self.forward.step(count, is_cut=is_cut)
        self._pool = graph.pool() if self._pool is None else self._pool
        return graph
