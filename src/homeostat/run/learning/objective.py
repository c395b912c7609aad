"""The part of the loop over given rows that differs between kinds of training.

plan of a step -> completed (what the loss needs under the current weights) -> update
     -> metrics of the update; metrics of the held-out rows
"""

from __future__ import annotations

from typing import Protocol

from homeostat.data.inputs import RowSet
from homeostat.data.store import RowStore
from homeostat.run.learning.attempts import Attempts
from homeostat.types import StepPlan, UpdateReport


class Objective(Protocol):
    def completed(self, plan: StepPlan, attempts: Attempts) -> StepPlan:
        """Return the plan with what its loss needs of the models as they are at this step."""
        ...

    def metrics(self, plan: StepPlan, report: UpdateReport) -> dict[str, float]:
        """Return the metrics that only this kind of training has."""
        ...

    def evaluate(self, rows: RowSet[RowStore], attempts: Attempts) -> dict[str, float]:
        """Return the metrics of the held-out rows; `eval/loss` is among them."""
        ...
