"""Decide which rows share a micro-batch.

`pack` first finds how few bins are needed (first fit, longest row first; plain first fit if that
happens to need fewer), rounds their number up to a multiple of the data groups that work at the
same time, then spreads the rows evenly over that many bins if they fit: an update of k equal
micro-batches is no slower than k - 1 full ones and a remainder, and its peak memory is lower. Rows
are concatenated without padding, so fill = tokens / (bins * max_tokens) measures how many steps the
budget costs, not wasted compute.

Bins come fullest first, and data groups take them in rounds of consecutive ones (dealing.py), so
the differences within the rounds add up to no more than that of the fullest and the emptiest bin:
at most the longest row if the rows were spread, at most `max_tokens` if only first fit found room.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from homeostat.arrays import IntArray
from homeostat.types import TokenRow

Bins = list[list[int]]


def pack(lengths: Sequence[int] | IntArray, max_tokens: int, *, multiple_of: int = 1) -> Bins:
    """Return the indices of the rows of each bin, the fullest bin first. Deterministic.

    No bin exceeds `max_tokens`, except that a longer row forms a bin by itself. The number of bins
    is a multiple of `multiple_of`, or the number of rows if there are too few of them.
    """
    assert max_tokens >= 1, max_tokens
    lengths_B = np.asarray(lengths, dtype=np.int64)
    # The caller decides whether such rows may exist; here each one is simply alone.
    oversize = [[int(row)] for row in np.flatnonzero(lengths_B > max_tokens)]
    fitting = np.flatnonzero(lengths_B <= max_tokens)
    longest_first = _longest_first(fitting, lengths_B)
    bins = _first_fit(longest_first, lengths_B, max_tokens)
    if len(bins) > math.ceil(int(lengths_B[fitting].sum()) / max_tokens):
        # Longest first is nearly always best, but not always; try the given order if a bin might be
        # saved.
        bins = min(bins, _first_fit(fitting, lengths_B, max_tokens), key=len)
    num_bins = _raised(len(bins) + len(oversize), multiple_of, most=len(lengths_B)) - len(oversize)
    spread = _spread(longest_first, lengths_B, num_bins, max_tokens=max_tokens)
    # Spreading can fail where first fit succeeded; then keep its bins and split until there are
    # enough.
    bins = _split_fullest(bins, lengths_B, num_bins) if spread is None else spread
    return _fullest_first(bins + oversize, lengths_B)


def pack_nested(rows: Sequence[TokenRow], max_tokens: int, *, multiple_of: int = 1) -> Bins:
    """Put runs of neighbouring rows into bins of at most `max_tokens` distinct tokens.

    A row whose prompt begins with the prompt of the row before it adds only what it has more. The
    order of the rows is kept; a row with more tokens than a bin holds forms one by itself.
    """
    assert max_tokens >= 1, max_tokens
    bins: Bins = []
    load, before_T = 0, np.zeros(0, dtype=np.int64)
    for number, row in enumerate(rows):
        prompt_T = row.tokens_T[: int(np.argmax(row.weights_T != 0))]
        continues = bool(bins) and np.array_equal(prompt_T[: len(before_T)], before_T)
        added = len(row) - (len(before_T) if continues else 0)
        if not bins or load + added > max_tokens:
            bins.append([])
            load, added = 0, len(row)
        bins[-1].append(number)
        load, before_T = load + added, prompt_T
    # Halve the bin of most rows until every data group has one.
    while len(bins) < _raised(len(bins), multiple_of, most=len(rows)):
        largest = max(range(len(bins)), key=lambda number: len(bins[number]))
        half = len(bins[largest]) // 2
        bins[largest : largest + 1] = [bins[largest][:half], bins[largest][half:]]
    return bins


def group(lengths: Sequence[int] | IntArray, rows_per_batch: int, *, multiple_of: int = 1) -> Bins:
    """Put a fixed number of rows into each bin, whatever their lengths: packing off.

    For one data group the rows stay in order. For several, the number of bins is rounded up as in
    `pack`, and the rows are spread evenly over them.
    """
    assert rows_per_batch >= 1, rows_per_batch
    lengths_B = np.asarray(lengths, dtype=np.int64)
    rows = np.arange(len(lengths_B))
    if multiple_of == 1:
        starts = range(0, len(rows), rows_per_batch)
        return [rows[start : start + rows_per_batch].tolist() for start in starts]
    num_bins = _raised(math.ceil(len(rows) / rows_per_batch), multiple_of, most=len(rows))
    order = _longest_first(rows, lengths_B)
    bins = _spread(order, lengths_B, num_bins, max_rows=rows_per_batch)
    assert bins is not None, "without a token budget every row fits"
    return _fullest_first(bins, lengths_B)


def fill(lengths: Sequence[int] | IntArray, *, num_bins: int, max_tokens: int) -> float:
    """Return the share of the bins' token budget that is used."""
    return float(np.sum(lengths)) / (num_bins * max_tokens) if num_bins else 0.0


def _raised(num_bins: int, multiple_of: int, *, most: int) -> int:
    assert multiple_of >= 1, multiple_of
    return min(most, math.ceil(num_bins / multiple_of) * multiple_of)


def _longest_first(rows: IntArray, lengths_B: IntArray) -> IntArray:
    # Stable sorting makes the result deterministic for rows of equal length.
    return rows[np.argsort(-lengths_B[rows], kind="stable")]


def _fullest_first(bins: Bins, lengths_B: IntArray) -> Bins:
    bins = [sorted(rows) for rows in bins]
    # Ties are broken by the rows themselves, so the order never depends on how bins were built.
    return sorted(bins, key=lambda rows: (-int(lengths_B[rows].sum()), rows))


def _first_fit(order: IntArray, lengths_B: IntArray, max_tokens: int) -> Bins:
    """Put each row into the first bin with room for it."""
    free = np.full(max(1, len(order)), max_tokens, dtype=np.int64)
    bins: Bins = []
    for row in order.tolist():
        length = lengths_B[row]
        # Unopened bins have the full budget, so the search always ends at one of them.
        chosen = int(np.argmax(free[: len(bins) + 1] >= length))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(row)
        free[chosen] -= length
    return bins


def _spread(
    longest_first: IntArray,
    lengths_B: IntArray,
    num_bins: int,
    *,
    max_tokens: float = math.inf,
    max_rows: float = math.inf,
) -> Bins | None:
    """Put each row into the emptiest bin that lacks rows; None if one would not fit."""
    bins: Bins = [[] for _ in range(num_bins)]
    # A heap of (load, bin): the emptiest bin is always at the front.
    loads = [(0, number) for number in range(num_bins)]
    for row in longest_first.tolist():
        load, number = heapq.heappop(loads)
        load += int(lengths_B[row])
        if load > max_tokens:
            return None
        bins[number].append(row)
        if len(bins[number]) < max_rows:
            heapq.heappush(loads, (load, number))
    return bins


def _split_fullest(bins: Bins, lengths_B: IntArray, num_bins: int) -> Bins:
    """Halve the fullest bin of several rows until there are enough bins."""
    bins = list(bins)
    while len(bins) < num_bins:
        several = (rows for rows in bins if len(rows) > 1)
        fullest = max(several, key=lambda rows: int(lengths_B[rows].sum()))
        bins.remove(fullest)
        halves = _spread(_longest_first(np.array(fullest), lengths_B), lengths_B, 2)
        assert halves is not None, "without a token budget every row fits"
        bins += halves
    return bins
