"""The signs of a run: which rules found something, which finding leads, which found nothing.

A sign is named by the code of the rule that sees it. Present are the findings of level warn or
above that no other finding explains; the one that leads is the first of them, by severity,
certainty and time. A rule that could not be evaluated, or whose finding another one explains, gives
no sign, neither present nor absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from homeostat.health.finding import Finding, Level


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of one run. `judged` are the codes that are present or absent for certain."""

    present: frozenset[str]
    lead: str
    judged: frozenset[str]


def signs_of(findings: Sequence[Finding], *, clear: Iterable[str]) -> Signs:
    """Return the signs in a diagnosis: its findings in order, and the rules that found nothing."""
    codes = [finding.code for finding in findings if finding.level is not Level.INFO]
    present = frozenset(codes)
    return Signs(present, codes[0] if codes else "", present | frozenset(clear))
