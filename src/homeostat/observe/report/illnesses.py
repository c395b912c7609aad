"""The illnesses of a run, from its findings and events: when each began and ended, what was done.

findings.jsonl -> a line where one opens (again, where it got worse), a line where it is over
events.jsonl   -> remedies, each with the code of the finding that it was for
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from homeostat.observe import ailments

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Remedy:
    """What was done at a step, and all that was said of it later."""

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
        """What was done; when it is judged only as long as it is not."""
        window = {"window": 0} if self.later else {}
        return ailments.remedy_text(str(self.applied["kind"]), {**self.applied, **window})

    @property
    def sequel(self) -> str:
        """What came of it; empty as long as nobody has said so."""
        told = (ailments.remedy_text(str(one["kind"]), one) for one in self.later)
        return "; ".join(text.removeprefix(f"{self.name} ") for text in told)

    @property
    def outcome(self) -> str:
        """good where it helped, bad where it did not, empty where nobody has said so yet."""
        verdicts = [one for one in self.later if one["kind"] == "remedy_judged"]
        return ("good" if verdicts[-1].get("helped") else "bad") if verdicts else ""


@dataclass(slots=True)
class Illness:
    """One spell of one finding. `finding` is the worst that was told of it."""

    finding: dict[str, Any]
    opened: int
    cleared: int | None = None
    remedies: list[Remedy] = field(default_factory=list)

    @property
    def began(self) -> int:
        """Where its rule saw it begin, which is before it was sure."""
        first = ailments.first_step_of(self.finding)
        return self.opened if first is None else min(first, self.opened)

    @property
    def level(self) -> str:
        return ailments.LEVELS[ailments.rank_of(self.finding)]

    @property
    def is_ill(self) -> bool:
        return ailments.is_ill(self.finding)


def read_illnesses(findings: Iterable[dict[str, Any]]) -> list[Illness]:
    """In the order in which they opened."""
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
    """Each with its verdict and its end. A guard of the run has events of its own."""
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
    """Give each remedy to the spell that it was for. Returns those whose spell is not on record:
    a run that goes back loses what it found after that step."""
    alone: list[Remedy] = []
    for remedy in remedies:
        code, step = remedy.applied.get("code"), remedy.step
        spells = [one for one in illnesses if one.finding["code"] == code and one.opened <= step]
        if spells:
            spells[-1].remedies.append(remedy)
        else:
            alone.append(remedy)
    return alone
