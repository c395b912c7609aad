"""Illnesses as data: which signs each of them causes, how often, and which sign leads.

A form is one of the ways in which the clinic causes an illness. An illness may have several, such
as a learning rate that is too high from the start, and one that jumps. `names` are the right
answers for a form, by their names in health/vocabulary.py: the illness itself first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from homeostat.arrays import FloatArray64

FILE = Path(__file__).parent / "illnesses.json"
# Stands for every illness that is not in the table.
OTHER = "another illness"


@dataclass(frozen=True, slots=True)
class Form:
    """A form of an illness: its number of runs, and in how many each sign was present or led."""

    names: tuple[str, ...]
    num_runs: int
    present: Mapping[str, int]
    leads: Mapping[str, int]

    @property
    def illness(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Weights:
    """The fitted numbers of the model.

    Each form's counts are mixed with the average over all forms, which counts as `smoothing` runs.
    `sharpness` multiplies the evidence of all signs, and `lead` that of the leading sign in
    addition. `other` is the prior probability of illnesses that are not in the table.
    """

    smoothing: float
    sharpness: float
    lead: float
    other: float


@dataclass(frozen=True)
class Table:
    """All forms by their name in the clinic, the fitted weights, and what they were fitted on."""

    forms: Mapping[str, Form]
    weights: Weights
    made_on: Mapping[str, Any]

    @cached_property
    def signs(self) -> dict[str, int]:
        """Return sign -> its column in the arrays below."""
        names = sorted({sign for form in self.forms.values() for sign in form.present})
        return {name: column for column, name in enumerate(names)}

    @cached_property
    def shares(self) -> FloatArray64:
        """Return how often each form (row) shows each sign (column); the last row is OTHER."""
        counts, total = self._counts([form.present for form in self.forms.values()])
        usual = ((counts / total).sum(axis=0) + 0.25) / (len(counts) + 5.0)
        return self._smoothed(counts, total, usual)

    @cached_property
    def lead_shares(self) -> FloatArray64:
        """Return how often each sign leads, with rows and columns as in `shares`."""
        counts, total = self._counts([form.leads for form in self.forms.values()])
        usual = (counts.sum(axis=0) + 0.5) / (counts.sum() + 0.5 * len(self.signs))
        return self._smoothed(counts, total, usual)

    def _counts(self, rows: Sequence[Mapping[str, int]]) -> tuple[FloatArray64, FloatArray64]:
        """Return the counts of each sign, and the number of runs of each form as a column."""
        counts = [[float(row.get(sign, 0)) for sign in self.signs] for row in rows]
        total = [[float(form.num_runs)] for form in self.forms.values()]
        return np.array(counts), np.array(total)

    def _smoothed(
        self, counts: FloatArray64, total: FloatArray64, usual: FloatArray64
    ) -> FloatArray64:
        smoothing = self.weights.smoothing
        return np.vstack([(counts + smoothing * usual) / (total + smoothing), usual])


def table_of(raw: Mapping[str, Any]) -> Table:
    """Build the table from the object in illnesses.json."""
    forms = {
        name: Form(tuple(one["names"]), one["runs"], one["present"], one["leads"])
        for name, one in raw["forms"].items()
    }
    return Table(forms, Weights(**raw["weights"]), raw["made_on"])


@cache
def fitted_table() -> Table:
    """Read illnesses.json once."""
    return table_of(json.loads(FILE.read_text(encoding="utf-8")))
