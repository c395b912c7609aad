"""Draw marks above a curve: a thin vertical line at a step with a label over it.

    marks -> those of one place together -> labels in rows without overlap -> SVG

Labels are above the plot's area, so they never cover a curve. If there are too many for the rows,
the line stays, and its text is shown on hover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from homeostat.observe.report.axes import Axis

# Kinds by severity: the most severe of one place determines the colour.
KINDS = ("remedy", "info", "warn", "error")
# Sizes in units of the drawing.
ROW_HEIGHT = 14
MAX_ROWS = 3
_LETTER, _GAP, _SAME_PLACE = 7.0, 12.0, 4.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A finding or remedy at a step. `kind` is a level, or `remedy`."""

    step: float
    label: str
    text: str
    kind: str


@dataclass(slots=True)
class Flag:
    """The marks of one place. `row` counts from the curve upwards; None if a label does not fit.

    `is_left` means that the label is to the left of its line.
    """

    marks: list[Mark]
    x: float
    is_left: bool
    row: int | None = None

    @property
    def label(self) -> str:
        return _label(self.marks)

    @property
    def span(self) -> tuple[float, float]:
        """Return where the label begins and ends."""
        width = _width(self.marks)
        return (self.x - width, self.x) if self.is_left else (self.x, self.x + width)

    def crosses(self, other: Flag) -> bool:
        """Return whether this line runs through the other's label."""
        low, high = other.span
        return low < self.x < high

    def fits(self, row: int, other: Flag) -> bool:
        """Return whether the label fits into this row beside the other one."""
        if other.row is None:
            return True
        (low, high), (other_low, other_high) = self.span, other.span
        is_clear = row != other.row or high <= other_low or other_high <= low
        below = other.crosses(self) and other.row >= row
        above = self.crosses(other) and row >= other.row
        return is_clear and not below and not above


def place(marks: Sequence[Mark], x_axis: Axis) -> list[Flag]:
    """Return the marks inside the axis, grouped by place."""
    inside = [mark for mark in marks if x_axis.low <= mark.step <= x_axis.high]
    groups: list[list[Mark]] = []
    for mark in sorted(inside, key=lambda one: one.step):
        x = x_axis.pixel(mark.step)
        if groups and x - x_axis.pixel(groups[-1][0].step) <= _SAME_PLACE:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    flags: list[Flag] = []
    for group in groups:
        group.sort(key=lambda one: -KINDS.index(one.kind))
        x = x_axis.pixel(group[0].step)
        flags.append(Flag(group, x, is_left=x + _width(group) > x_axis.end))
    _give_rows(flags)
    return flags


def _give_rows(flags: Sequence[Flag]) -> None:
    """Assign label rows so that no line runs through a label.

    A label is above the lines that would cross it, so those lines get their rows first. A remedy
    gets a label only if every finding keeps its own.
    """
    to_right = [flag for flag in reversed(flags) if not flag.is_left]
    order = [*to_right, *(flag for flag in flags if flag.is_left)]
    order.sort(key=lambda flag: flag.marks[0].kind == "remedy")
    for number, flag in enumerate(order):
        free = (
            row for row in range(MAX_ROWS) if all(flag.fits(row, one) for one in order[:number])
        )
        flag.row = next(free, None)


def num_rows(flags: Sequence[Flag]) -> int:
    return max((flag.row + 1 for flag in flags if flag.row is not None), default=0)


def draw(flags: Sequence[Flag], *, top: float, base: float) -> list[str]:
    """Draw the flags. `top` and `base` are the edges of the plot's area."""
    return [_drawn(flag, top=top, base=base) for flag in flags]


def told(flags: Sequence[Flag]) -> str:
    """Describe all marks in words, for people who do not see the drawing."""
    return "; ".join(mark.text for flag in flags for mark in flag.marks)


def _drawn(flag: Flag, *, top: float, base: float) -> str:
    x, kind = flag.x, flag.marks[0].kind
    title = escape("\n".join(mark.text for mark in flag.marks))
    high = top if flag.row is None else top - ROW_HEIGHT * flag.row - 10
    line = f"M{x:.1f} {high:.1f}V{base:.1f}"
    label = ""
    if flag.row is not None:
        shift, anchor = (-4, "end") if flag.is_left else (4, "start")
        y = top - ROW_HEIGHT * flag.row - 3
        where = f'x="{x + shift:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        label = f"<text {where}>{escape(flag.label)}</text>"
    # A wider invisible line that a pointer can hit.
    lines = f'<path class="hit" d="{line}"/><path d="{line}"/>'
    return f'<g class="mark {kind}"><title>{title}</title>{lines}{label}</g>'


def _width(marks: Sequence[Mark]) -> float:
    return _LETTER * len(_label(marks)) + _GAP


def _label(marks: Sequence[Mark]) -> str:
    names = list(dict.fromkeys(mark.label for mark in marks))
    return names[0] if len(names) == 1 else f"{names[0]} +{len(names) - 1}"
