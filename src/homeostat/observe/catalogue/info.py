"""Define an entry of the metric catalogue, and how the values of several steps are combined."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reduce(StrEnum):
    """The reduction that combines the values of several steps into one record."""

    MEAN = "mean"
    RATE = "rate"
    LAST = "last"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One entry of the catalogue.

    In a name `<i>` stands for a number, `<name>` for a label from the recipe or from homeostat, and
    `<text>` for a name that a user's function chose: printable characters, including slashes and
    spaces.
    """

    name: str
    unit: str
    reduce: Reduce
    meaning: str
    own_step: bool = False


MEAN, RATE, LAST, SUM, MAX, MIN = Reduce
