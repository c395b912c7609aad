"""Which rows share a micro-batch.

`pack` first finds how few bins are needed (first fit, longest row first; plain first fit where
that happens to need fewer), then spreads the rows evenly over that many bins where they fit: an
update of k equal micro-batches is no slower than k - 1 full ones and a rest, and its peak memory
is lower. Rows lie end to end without padding, so fill = tokens / (bins * max_tokens) measures how
many steps the budget costs, not wasted compute.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from homeostat.types import IntArray

Bins = list[list[int]]


def pack(lengths: Sequence[int] | IntArray, max_tokens: int) -> Bins:
    """Indices of the rows of each bin, the fullest bin first. Deterministic.

    No bin is over `max_tokens`, but a row that alone is longer has a bin of its own.
    """
    assert max_tokens >= 1, max_tokens
    lengths_B = np.asarray(lengths, dtype=np.int64)
    oversize = [[int(row)] for row in np.flatnonzero(lengths_B > max_tokens)]
    fitting = np.flatnonzero(lengths_B <= max_tokens)
    longest_first = fitting[np.argsort(-lengths_B[fitting], kind="stable")]
    bins = _first_fit(longest_first, lengths_B, max_tokens)
    if len(bins) > math.ceil(int(lengths_B[fitting].sum()) / max_tokens):
        bins = min(bins, _first_fit(fitting, lengths_B, max_tokens), key=len)
    bins = _spread(longest_first, lengths_B, len(bins), max_tokens) or bins
    bins = [sorted(rows) for rows in bins] + oversize
    return sorted(bins, key=lambda rows: (-int(lengths_B[rows].sum()), rows))


def group(num_rows: int, rows_per_batch: int) -> Bins:
    """Rows in order, so many to a bin: packing off."""
    assert rows_per_batch >= 1, rows_per_batch
    rows = list(range(num_rows))
    return [rows[start : start + rows_per_batch] for start in range(0, num_rows, rows_per_batch)]


def fill(lengths: Sequence[int] | IntArray, *, num_bins: int, max_tokens: int) -> float:
    """Share of the token budget of the bins that is used."""
    return float(np.sum(lengths)) / (num_bins * max_tokens) if num_bins else 0.0


def _first_fit(order: IntArray, lengths_B: IntArray, max_tokens: int) -> Bins:
    """Each row into the first bin with room for it."""
    free = np.full(max(1, len(order)), max_tokens, dtype=np.int64)
    bins: Bins = []
    for row in order.tolist():
        length = lengths_B[row]
        # Bins not opened yet have all the room, so the search always ends at one of them.
        chosen = int(np.argmax(free[: len(bins) + 1] >= length))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(row)
        free[chosen] -= length
    return bins


def _spread(
    longest_first: IntArray, lengths_B: IntArray, num_bins: int, max_tokens: int
) -> Bins | None:
    """Each row into the emptiest bin, longest first. None where one would not fit."""
    bins: Bins = [[] for _ in range(num_bins)]
    loads = [(0, number) for number in range(num_bins)]
    for row in longest_first.tolist():
        load, number = loads[0]
        load += int(lengths_B[row])
        if load > max_tokens:
            return None
        bins[number].append(row)
        heapq.heapreplace(loads, (load, number))
    return bins
