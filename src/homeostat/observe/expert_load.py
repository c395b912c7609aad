"""The load of every expert over a run: expert_load.jsonl, which the report draws.

A record covers the steps from `first_step` to `step`. Its `load` has, for each layer with experts,
each expert's tokens against an even share: 1 is even, 0 is an expert without a token. The first
steps have a record each, later ones share records, so that the file grows with the logarithm of
the number of steps: about 120 records for 10,000 steps.

Suffixes: `_L` layers with experts, `_E` experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.observe.jsonl import is_record

# A record covers at most this part of the steps so far.
_PART = 16


class LoadHistory:
    """Adds up the load of steps until a record is due. `start_step` is the last one before."""

    def __init__(self, start_step: int) -> None:
        self._last_step = start_step
        self._newest = start_step
        self._total_LE: FloatArray64 | None = None

    def add(self, step: int, load_LE: FloatArray64) -> dict[str, Any] | None:
        """Add a step's load; return a record if one is due."""
        self._total_LE = load_LE if self._total_LE is None else self._total_LE + load_LE
        self._newest = step
        is_due = step - self._last_step >= max(1, step // _PART)
        return self.rest() if is_due else None

    def rest(self) -> dict[str, Any] | None:
        """Return the record of the steps since the last one; None if there are none."""
        total_LE = self._total_LE
        if total_LE is None or not total_LE.any():
            return None
        relative_LE = total_LE / np.maximum(total_LE.mean(axis=1, keepdims=True), 1e-9)
        record = {
            "step": self._newest,
            "first_step": self._last_step + 1,
            # Three digits: a load that is small is not 0.
            "load": [[float(f"{load:.3g}") for load in layer] for layer in relative_LE],
        }
        self._last_step, self._total_LE = self._newest, None
        return record


def is_expert_load(record: Mapping[str, Any]) -> bool:
    """Return whether a line is a record of the load: layers of equally many numbers."""
    layers, first = record.get("load"), record.get("first_step")
    if not (is_record(record) and type(first) is int and isinstance(layers, list) and layers):
        return False
    if not all(isinstance(layer, list) and layer for layer in layers):
        return False
    numbers = all(type(load) is float and load >= 0 for layer in layers for load in layer)
    return numbers and len({len(layer) for layer in layers}) == 1
