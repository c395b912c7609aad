"""Reconstruct the findings of a run: when each opened and closed, and which remedies were applied.

findings.jsonl -> a line when a finding opens (again if it got worse), a line when it closes
events.jsonl   -> remedies, each with the code of its finding
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from homeostat.observe import ailments

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A remedy applied at a step, and all later events about it."""

    applied: Event
    later: list[Event] = field(default_factory=list)

    @property
    def step(self) -> int:
        return int(self.applied["step"])

    @property
    def name(self) -> str:
        return ailments.short(self.applied.get("remedy") or "remedy").replace("_", " ")

    @property
    def text(self) -> str:
        """Describe the remedy, and when it will be judged if that is still to come."""
        window = {"window": 0} if self.later else {}
        return ailments.remedy_text(str(self.applied["kind"]), {**self.applied, **window})

    @property
    def sequel(self) -> str:
        """Describe the result of the remedy; empty while there is none."""
        told = (ailments.remedy_text(str(one["kind"]), one) for one in self.later)
        return "; ".join(text.removeprefix(f"{self.name} ") for text in told)

    @property
    def outcome(self) -> str:
        """Return "good" if it helped, "bad" if not, and an empty text if it is not judged yet."""
        verdicts = [one for one in self.later if one["kind"] == "remedy_judged"]
        return ("good" if verdicts[-1].get("helped") else "bad") if verdicts else ""


@dataclass(slots=True)
class Illness:
    """One episode of a finding, from opening to closing. `finding` is its worst state."""

    finding: dict[str, Any]
    opened: int
    cleared: int | None = None
    remedies: list[Remedy] = field(default_factory=list)

    @property
    def began(self) -> int:
        """Return the step at which the rule saw it begin, which is before it was sure."""
        first = ailments.first_step_of(self.finding)
        return self.opened if first is None else min(first, self.opened)

    @property
    def level(self) -> str:
        return ailments.LEVELS[ailments.rank_of(self.finding)]

    @property
    def is_ill(self) -> bool:
        return ailments.is_ill(self.finding)


def read_illnesses(findings: Iterable[dict[str, Any]]) -> list[Illness]:
    """Return all episodes in the order in which they opened."""
    found: list[Illness] = []
    current: dict[tuple[str, str], Illness] = {}
    for record in findings:
        key, step = ailments.key_of(record), int(record["step"])
        known = current.get(key)
        if record["state"] == "cleared":
            if known is not None:
                current.pop(key).cleared = step
        elif known is not None:
            known.finding = record
        else:
            current[key] = Illness(record, step)
            found.append(current[key])
    return found


def read_remedies(events: Iterable[Event]) -> list[Remedy]:
    """Return each remedy with its verdict and end. Guards of the run have their own events."""
    found: list[Remedy] = []
    newest: dict[tuple[str, str], Remedy] = {}
    for event in events:
        kind = str(event["kind"])
        if kind not in ailments.REMEDY_EVENTS or ailments.tells_twice(kind, event):
            continue
        key = (str(event.get("code", "")), str(event.get("remedy", "")))
        if kind in ("remedy_judged", "remedy_reverted") and key in newest:
            newest[key].later.append(event)
        else:
            newest[key] = Remedy(event)
            found.append(newest[key])
    return found


def share_out(remedies: Iterable[Remedy], illnesses: list[Illness]) -> list[Remedy]:
    """Assign each remedy to its episode and return the remedies without one.

    A run that goes back to an earlier step loses the findings after that step.
    """
    alone: list[Remedy] = []
    for remedy in remedies:
        code, step = remedy.applied.get("code"), remedy.step
        spells = [one for one in illnesses if one.finding["code"] == code and one.opened <= step]
        if spells:
            spells[-1].remedies.append(remedy)
        else:
            alone.append(remedy)
    return alone
