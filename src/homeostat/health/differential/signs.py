"""The signs of a run: which rules found something, which finding leads, which found nothing.

A sign is identified by the code of its rule. It is present if the rule has a finding of level warn
or above that no other finding explains. The leading sign is the first of these, ordered by
severity, certainty and time. A rule gives no sign, neither present nor absent, if it could not be
evaluated or if another finding explains its finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from homeostat.health.finding import Finding, Level


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of one run. `judged` are the codes that are known to be present or absent."""

    present: frozenset[str]
    lead: str
    judged: frozenset[str]


def signs_of(findings: Sequence[Finding], *, clear: Iterable[str]) -> Signs:
    """Return the signs of a diagnosis, given its findings in order and the rules without any."""
    codes = [finding.code for finding in findings if finding.level is not Level.INFO]
    present = frozenset(codes)
    return Signs(present, codes[0] if codes else "", present | frozenset(clear))
