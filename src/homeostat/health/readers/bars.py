"""Progress bars as tqdm prints them, and the metrics some trainers put behind them.

    12%|#1        | 8/64 [00:52<06:09, 6.60s/it, pg=0.0496, rm=0.33, glen=759, kl=0.00112]

A bar that begins anew counts on from where it was: it is drawn once per epoch or rollout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from homeostat.health.readers.numbers import VALUE, number
from homeostat.health.readers.rows import Row

_BAR = re.compile(
    r"(?P<title>[^|]{0,200}?)\s*\d{1,3}%\|[^|]{0,400}\|\s*(?P<count>\d{1,12})/(?P<total>\d{1,12})"
    r"\s*\[(?P<inside>[^\]]{0,5000})\]?"
)
_POSTFIX = re.compile(
    rf"(?:^|,\s*)(?P<name>[A-Za-z_][\w./ -]{{0,60}}?)\s*[=:]\s*(?P<value>{VALUE})"
)
_TRAINING = re.compile(
    r"(?:train(?:ing)?(?: progress| steps?| epoch)?|episode|epoch|steps?|iterations?)?"
    r"\s*(?:\[?\d*(?:/\d+)?\]?)?\s*:?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Bar:
    title: str
    count: int
    total: int
    values: dict[str, float]
    end: int

    @property
    def is_training(self) -> bool:
        return _TRAINING.fullmatch(self.title) is not None


def bar_in(body: str) -> Bar | None:
    if "%|" not in body:
        return None
    found = _BAR.search(body)
    if not found:
        return None
    values = {}
    # The time and the rate come first.
    for pair in _POSTFIX.finditer(found["inside"].partition(", ")[2]):
        value = number(pair["value"])
        if value is not None:
            values[pair["name"].strip()] = value
    title = found["title"].strip()
    return Bar(title, int(found["count"]), int(found["total"]), values, found.end())


class BarRows:
    """Bars with metrics -> rows, counted through."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def row(self, bar: Bar) -> Row:
        title = re.sub(r"\d+", "", bar.title)
        last = self._last.get(title, 0)
        if bar.count < last:
            self._before[title] = self._before.get(title, 0) + last
        self._last[title] = bar.count
        step = self._before.get(title, 0) + bar.count
        return Row(dict(bar.values), step, channel=f"bar:{title}", form="bar")
