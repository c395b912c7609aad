"""Metrics of the policy over all rows of an update, including those that it leaves out.

With `algorithm.skip_zero_advantage` rows with advantage 0 are not trained, because their gradient
is 0. Groups that are always solved or never solved are those on which the policy is most certain.
The entropy of the other rows alone would therefore be too high, and would hide a collapsed policy.

The rows left out are measured by a forward pass without a gradient, under the weights before the
update. Of many rows NUM_MEASURED, spread evenly, stand for all: their sums are scaled to the tokens
of all rows left out (a stratified estimate; exact where there are no more than that). Extremes are
those of the measured rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from homeostat.train.update import Measured
from homeostat.types import TokenRow, UpdateReport

# Largest number of left-out rows of an update that are measured, which limits the cost.
NUM_MEASURED = 8
_MAXIMA = ("ratio_max", "ratio_min_neg")


def some_of(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Return at most NUM_MEASURED of the rows, spread evenly."""
    if len(rows) <= NUM_MEASURED:
        return list(rows)
    return [rows[index * len(rows) // NUM_MEASURED] for index in range(NUM_MEASURED)]


def num_trained(row: TokenRow) -> int:
    return int(np.count_nonzero(row.weights_T))


def scaled_up(found: Measured, *, num_tokens: int) -> dict[str, float]:
    """Scale the measurements of some rows to all rows, whose number of trained tokens is given."""
    factor = num_tokens / found.sums["tokens"]
    return {name: factor * value for name, value in found.sums.items()} | dict(found.maxima)


def together(report: UpdateReport, others: Mapping[str, float]) -> dict[str, float]:
    """The measurements of an update and of the rows that it left out."""
    stats = report.stats
    assert stats.keys() == others.keys(), (stats.keys(), others.keys())
    return {
        name: float(np.max([stats[name], others[name]]))
        if name in _MAXIMA
        else stats[name] + others[name]
        for name in stats
    }
