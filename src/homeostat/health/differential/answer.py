"""The doctor's answer beside the findings: how likely each illness is, and what would decide.

The probabilities were shown to be calibrated only for runs of ours whose signs the clinic has seen
(docs/guide/differential.md). For other runs, the answer has no probabilities, only what would
distinguish the first causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from homeostat.health.differential.deciding import Decider, deciders
from homeostat.health.differential.illnesses import OTHER, Table
from homeostat.health.differential.posterior import illness_posterior, is_covered
from homeostat.health.differential.signs import signs_of
from homeostat.health.finding import Finding, Level

# Illnesses that are less likely than this are not reported.
MIN_SHARE = 0.05
MAX_ILLNESSES = 4
MAX_DECIDERS = 2
# Number of causes of the first finding that are to be distinguished.
NUM_CAUSES = 3


@dataclass(frozen=True, slots=True)
class Likely:
    """An illness and its probability, given all signs."""

    name: str
    probability: float


@dataclass(frozen=True, slots=True)
class Differential:
    """The illnesses that explain the signs, the most likely first, and how to distinguish them."""

    illnesses: tuple[Likely, ...] = ()
    deciders: tuple[Decider, ...] = ()


NOTHING = Differential()


def differential(
    findings: Sequence[Finding], *, clear: Iterable[str], is_calibrated: bool, table: Table
) -> Differential:
    """Return the differential of a diagnosis. `is_calibrated` is True for our own runs."""
    ill = [one for one in findings if one.level is not Level.INFO]
    if not ill:
        return NOTHING
    signs = signs_of(ill, clear=clear)
    likely: tuple[Likely, ...] = ()
    if is_calibrated and is_covered(signs, table):
        shares = illness_posterior(signs, table)
        found = [Likely(name, share) for name, share in shares.items() if share >= MIN_SHARE]
        likely = tuple(found[:MAX_ILLNESSES])
    causes = [cause.name for cause in ill[0].causes[:NUM_CAUSES]]
    names = [one.name for one in likely if one.name != OTHER] + causes
    return Differential(likely, tuple(deciders(names))[:MAX_DECIDERS])
