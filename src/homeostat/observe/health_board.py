"""Show the health of a run in the live panel: one word if it is well, else what is wrong.

    findings, events -> HealthBoard -> items, redrawn only when something changed

A healthy run takes one line. For an ill run the worst findings are shown, each with what was
observed, its first cause and the remedy, in at most a third of the panel.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from homeostat.observe import ailments
from homeostat.observe.panel import LABEL_WIDTH, Item, Room, fit, labelled

MAX_SHOWN = 3
# Number of steps for which a closed finding is still mentioned.
NOTE_STEPS = 20
# Ranks of a finding's lines: lines of a higher rank are dropped first.
_MESSAGE, _DONE, _CAUSE, _CALM = 1, 2, 3, 4
MAX_MESSAGE_LINES = 3
_STYLES = {"error": "bold red", "warn": "yellow"}
_BORDERS = {"error": "red", "warn": "yellow", "": "cyan"}


class HealthBoard:
    """The open findings, the last remedy for each code, and the number of active rules."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], ailments.Record] = {}
        self._done: dict[str, tuple[int, str]] = {}
        # The newest notable event while the run is healthy.
        self._note: tuple[int, str] | None = None
        self._num_rules = 0
        self._num_changes = 0
        self._drawn: tuple[tuple[Any, ...], list[Item]] = ((), [])

    def finding(self, step: int, finding: ailments.Record) -> None:
        key = ailments.key_of(finding)
        if finding["state"] == "cleared":
            self._open.pop(key, None)
            self._note = (step, f"{ailments.label_of(finding)} over since step {step:,}")
        else:
            self._open[key] = finding
        self._num_changes += 1

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        if kind == "rules_watching":
            self._num_rules = int(fields.get("rules", 0))
        elif kind in ailments.REMEDY_EVENTS and not ailments.tells_twice(kind, fields):
            text = ailments.remedy_text(kind, fields)
            self._done[str(fields.get("code", ""))] = (step, text)
            self._note = (step, f"step {step:,}: {text}")
        else:
            return
        self._num_changes += 1

    @property
    def border(self) -> str:
        """Return the colour of the panel's frame."""
        ill = [one for one in self._open.values() if ailments.is_ill(one)]
        return _BORDERS[str(max(ill, key=ailments.rank_of)["level"]) if ill else ""]

    def items(self, room: Room, *, step: int) -> list[Item]:
        note = self._note is not None and step - self._note[0] <= NOTE_STEPS
        state = (room, note, self._num_changes)
        if state != self._drawn[0]:
            self._drawn = (state, self._draw(room, with_note=note))
        return self._drawn[1]

    def _draw(self, room: Room, *, with_note: bool) -> list[Item]:
        found = ailments.worst_first(self._open.values())
        ill = [one for one in found if ailments.is_ill(one)]
        if not ill:
            return [Item(self._calm_line(found, room, with_note=with_note), _CALM)]
        num_lines = max(1, room.height // 3)
        shown = ill[: min(MAX_SHOWN, max(1, num_lines // 2))]
        items: list[Item] = []
        spare = num_lines - len(shown)
        for number, finding in enumerate(shown):
            num_more = len(found) - len(shown) if finding is shown[-1] else 0
            label = "" if number else "health"
            items.append(Item(_head(finding, room, label=label, num_more=num_more)))
            notes = self._notes(finding)
            # The worst finding is shown in full if there is room; the others get one line.
            most = 1 if number else max(1, min(MAX_MESSAGE_LINES, spare - len(notes)))
            details = [*_message(finding, room, num_lines=most), *notes]
            # The lines of a finding are dropped before those of the one above it.
            items += [Item(one.line, one.rank + 3 * number) for one in details]
        return fit(items, num_lines)

    def _calm_line(self, notes: list[ailments.Record], room: Room, *, with_note: bool) -> Text:
        if not self._num_rules:
            return labelled("health", [Text("waiting for the first record", "dim")], room)
        cells = [Text("healthy", "bold green"), Text(f"{self._num_rules} rules watch", "dim")]
        if with_note and self._note is not None:
            cells.append(Text(self._note[1], "cyan"))
        if notes:
            labels = ", ".join(map(ailments.label_of, notes))
            cells.append(Text(f"{_counted(len(notes), 'note')}: {labels}", "dim"))
        return labelled("health", cells, room)

    def _notes(self, finding: ailments.Record) -> list[Item]:
        """Return the first cause of a finding and its remedy."""
        items: list[Item] = []
        for name, why in ailments.causes_of(finding)[:1]:
            line = Text.assemble(("cause  ", "dim"), name, (f": {why}" if why else "", "dim"))
            items.append(Item(_indented(line), _CAUSE))
        if str(finding["code"]) in self._done:
            step, text = self._done[str(finding["code"])]
            line = Text.assemble(("done   ", "dim"), (f"step {step:,}: {text}", "cyan"))
            items.append(Item(_indented(line), _DONE))
        return items


def _message(finding: ailments.Record, room: Room, *, num_lines: int) -> list[Item]:
    text, width = ailments.short(finding.get("message", "")), max(10, room.width - LABEL_WIDTH)
    told = textwrap.wrap(text, width, max_lines=num_lines, placeholder=" ...")
    return [Item(_indented(Text(line)), _MESSAGE) for line in told]


def _head(finding: ailments.Record, room: Room, *, label: str, num_more: int) -> Text:
    style = _STYLES[str(finding["level"])]
    what = Text.assemble((f"{finding['level']}  ", style), (ailments.label_of(finding), style))
    first = ailments.first_step_of(finding)
    since = [] if first is None else [Text(f"since step {first:,}", "dim")]
    more = [Text(f"+{num_more} more", "bold")] if num_more else []
    line = labelled(label, [what, *since, *more], room)
    # The number of findings is more useful than the step at which they began.
    return line if not more or more[0].plain in line.plain else labelled(label, [what, *more], room)


def _indented(line: Text) -> Text:
    return Text.assemble(" " * LABEL_WIDTH, line)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
