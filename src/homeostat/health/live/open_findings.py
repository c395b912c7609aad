"""Keep track of open findings: each is reported once, and again if it gets worse.

A finding opens when it is first seen and closes after `clear_after` evaluations in a row without
it. If another finding explains it from some step on, it stays open as long as its rule fires: it is
not over. At most one finding per key is open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from homeostat.health.diagnose import in_order
from homeostat.health.finding import Finding, Level
from homeostat.health.records import Change, State

Key = tuple[str, str]


@dataclass(slots=True)
class _Open:
    finding: Finding
    # The most severe level that was reported.
    told: Level
    # Number of evaluations in a row without the finding.
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
        """Continue with findings that were open. `quiet` is what `quiet()` returned there."""
        self._open = {f.key: _Open(f, f.level, int(quiet.get(f.key, 0))) for f in findings}

    def quiet(self) -> dict[Key, int]:
        """Return the number of evaluations since each finding was last seen, where it is not 0."""
        return {key: entry.quiet for key, entry in self._open.items() if entry.quiet}

    def settle(
        self, step: int, seen: Mapping[Key, Finding], *, explained: Collection[Key] = ()
    ) -> list[Change]:
        """Update the open findings with those seen now, and return what opened or closed.

        `explained` are findings that are there, too, but are symptoms of those seen.
        """
        changes: list[Change] = []
        for key, entry in list(self._open.items()):
            if key in explained:
                entry.quiet = 0
            if key in seen or key in explained:
                continue
            entry.quiet += 1
            if entry.quiet >= self._clear_after:
                del self._open[key]
                changes.append(Change(State.CLEARED, step, entry.finding))
        for key, finding in seen.items():
            known = self._open.get(key)
            if known is not None:
                # The window of a rule moves, but the first step of the finding stays.
                finding = dataclasses.replace(finding, first_step=known.finding.first_step)
            if known is None or finding.level.rank > known.told.rank:
                changes.append(Change(State.OPEN, step, finding))
                self._open[key] = _Open(finding, finding.level)
            else:
                self._open[key] = _Open(finding, known.told)
        return changes
