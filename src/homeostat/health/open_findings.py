"""Keep track of which findings are open: each is reported once, and again if it gets worse.

A finding opens the first time that it is seen, stays open while it is, and closes after
`clear_after` looks without it. There is at most one open finding per key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from homeostat.health.diagnose import in_order
from homeostat.health.finding import Finding, Level
from homeostat.health.records import Change, State

Key = tuple[str, str]


@dataclass(slots=True)
class _Open:
    finding: Finding
    # The worst state that was reported.
    told: Level
    # Number of consecutive looks without it.
    quiet: int = 0


class OpenFindings:
    """The findings that are open now."""

    def __init__(self, *, clear_after: int = 3) -> None:
        self._clear_after = clear_after
        self._open: dict[Key, _Open] = {}

    @property
    def findings(self) -> list[Finding]:
        """Return the open findings, the most likely illness first."""
        return in_order([entry.finding for entry in self._open.values()])

    def restore(self, findings: Iterable[Finding], quiet: Mapping[Key, int]) -> None:
        """Continue with findings that were open; `quiet` is what `quiet` returned then."""
        self._open = {f.key: _Open(f, f.level, int(quiet.get(f.key, 0))) for f in findings}

    def quiet(self) -> dict[Key, int]:
        """Return how many looks each finding was not seen; those that were seen are left out."""
        return {key: entry.quiet for key, entry in self._open.items() if entry.quiet}

    def settle(self, step: int, seen: Mapping[Key, Finding]) -> list[Change]:
        """Take in what is seen now, and return what changed."""
        changes: list[Change] = []
        for key, entry in list(self._open.items()):
            if key in seen:
                continue
            entry.quiet += 1
            if entry.quiet >= self._clear_after:
                del self._open[key]
                changes.append(Change(State.CLEARED, step, entry.finding))
        for key, finding in seen.items():
            known = self._open.get(key)
            if known is not None:
                # The window of a rule moves, but the step at which the finding began stays.
                finding = dataclasses.replace(finding, first_step=known.finding.first_step)
            if known is None or finding.level.rank > known.told.rank:
                changes.append(Change(State.OPEN, step, finding))
                self._open[key] = _Open(finding, finding.level)
            else:
                self._open[key] = _Open(finding, known.told)
        return changes
