"""Correct the steps of rows that were only counted, if the count exceeds the run's length or misses
steps.

A bar is printed to stderr at once, but rows to stdout in blocks. So the rows of many steps may
follow the last drawing of the bar, and counting on from its step gives wrong steps. Without a bar,
the epochs show how many steps there are between two rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from homeostat.health.readers.values.numbers import number_of
from homeostat.health.view import Series

# Settings that the banner of transformers states.
_ROWS, _BATCH, _EPOCHS = "num_examples", "total_train_batch_size", "num_train_epochs"


def spread_to(
    counted: int, *, total: int, bar: int, epoch: float | None, settings: Mapping[str, Any]
) -> int:
    """Return the step that the newest of `counted` rows belongs to; 0 if the count is right.

    `bar` is the newest step that a progress bar showed, 0 if there was none.
    """
    if 0 < bar <= total < counted:
        return bar
    if bar or not total or not epoch or epoch <= 0.0:
        return 0
    newest = _step_of_epoch(epoch, total, settings)
    return newest if newest > counted else 0


def _step_of_epoch(epoch: float, total: int, settings: Mapping[str, Any]) -> int:
    rows, batch, epochs = (number_of(settings.get(name)) for name in (_ROWS, _BATCH, _EPOCHS))
    if rows and batch:
        # The epochs that a banner states are too many where max_steps ends the run.
        return min(total, round(epoch * math.ceil(rows / batch)))
    return min(total, round(epoch / epochs * total)) if epochs else 0


def spread(series: Mapping[str, Series], newest: int) -> dict[str, Series]:
    """Return the series with their steps spread evenly up to `newest`; 0: as they are."""
    if not series or not newest:
        return dict(series)
    steps = np.unique(np.concatenate([one.steps for one in series.values()]))
    if len(steps) > newest:
        return dict(series)
    places = np.arange(1, len(steps) + 1, dtype=np.int64) * newest // len(steps)
    return {
        name: Series(places[np.searchsorted(steps, one.steps)], one.values)
        for name, one in series.items()
    }
