"""Parse tqdm progress bars, with the metrics that some trainers append to them.

    12%|#1        | 8/64 [00:52<06:09, 6.60s/it, pg=0.0496, rm=0.33, glen=759, kl=0.00112]

A bar that starts again (once per epoch or rollout) continues the count of the one before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from homeostat.health.readers.rows.row import Row
from homeostat.health.readers.values.numbers import NUMBER, VALUE, number

# Match from the percent sign on; the title before it is read backwards from there.
_BAR = re.compile(
    r"%\|[^|]{0,400}+\|\s*+(?P<count>\d{1,12})/(?P<total>\d{1,12})"
    r"\s*+\[(?P<inside>[^\]]{0,5000}+)\]?"
)
_MAX_TITLE = 200
_EVALUATED = ("val_", "val/", "valid_", "valid/", "eval_", "eval/")
_POSTFIX = re.compile(
    rf"(?:^|,\s*+)(?P<name>[A-Za-z_][\w./ -]{{0,60}}+)\s*+[=:]\s*+(?P<value>{VALUE})"
)
# torchtune prints "1|25|Loss: 1.21:  10%|...": the title of the bar is the newest loss.
_IN_TITLE = re.compile(rf"(?P<name>[A-Za-z_][\w ]{{0,40}}+)\s*+[:=]\s*+(?P<value>{NUMBER})\s*+:?")
_SPEED_OF_ENGINE = "est. speed input"
_TRAINING = re.compile(
    r"(?:train(?:ing)?(?: progress| steps?| epoch)?|episode|epoch|steps?|iterations?)?"
    r"\s*+(?:\[?\d*+(?:/\d++)?\]?)?\s*+:?",
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

    @property
    def is_of_engine(self) -> bool:
        """Return whether vLLM drew it: it counts prompts, and appends only its speed."""
        return _SPEED_OF_ENGINE in self.values


def bar_in(body: str) -> Bar | None:
    at = body.find("%|")
    while at >= 0:
        found = _BAR.match(body, at)
        title = _title(body, at) if found else None
        if found and title is not None:
            return _bar(found, title)
        at = body.find("%|", at + 2)
    return None


def _title(body: str, at: int) -> str | None:
    """Return the title of a bar, back to the previous bar; None if no percentage follows it."""
    digits = 0
    while digits < 3 and body[at - digits - 1 : at - digits].isdecimal():
        digits += 1
    if not digits:
        return None
    end = at - digits
    start = max(body.rfind("|", 0, end) + 1, end - _MAX_TITLE, 0)
    return body[start:end].strip()


def _bar(found: re.Match[str], title: str) -> Bar:
    values = {}
    # The time and the rate come before the metrics.
    for pair in _POSTFIX.finditer(found["inside"].partition(", ")[2]):
        value = number(pair["value"])
        if value is not None:
            values[pair["name"].strip()] = value
    if "reduced_train_loss" in values:
        # NeMo: Lightning's own loss is a mean that NeMo leaves empty, so it is always NaN.
        values.pop("loss", None)
    named = _IN_TITLE.fullmatch(title)
    if named and number(named["value"]) is not None:
        title = named["name"].strip()
        values.setdefault(title, float(number(named["value"]) or 0.0))
    return Bar(title, int(found["count"]), int(found["total"]), values, found.end())


@dataclass(slots=True)
class _Drawn:
    """The last state of the bar with one title, and the number of rows before it started again."""

    count: int
    values: dict[str, float]
    before: int = 0
    step: int = 0


class BarRows:
    """Turn bars with metrics into rows with a continuous step count."""

    def __init__(self) -> None:
        self._drawn: dict[str, _Drawn] = {}
        self._between: set[str] = set()

    def other(self, bar: Bar) -> None:
        """Note a bar without metrics. Bars that are printed around it start again after it."""
        self._between = set(self._drawn) - {_untold(bar.title)}

    def row(self, bar: Bar) -> Row:
        title = _untold(bar.title)
        last = self._drawn.get(title)
        values = dict(bar.values)
        if last is not None:
            # A bar shows the newest evaluation until the next one: Lightning's val_loss.
            values = {
                name: value
                for name, value in values.items()
                if not name.startswith(_EVALUATED) or last.values.get(name) != value
            }
        if last is None:
            # A log that prints only full bars has one row per bar.
            step = 1 if bar.count == bar.total else bar.count
            self._drawn[title] = _Drawn(bar.count, dict(bar.values), step - bar.count, step)
        else:
            if self._is_anew(bar, title, last):
                is_full = bar.count == bar.total == last.count
                last.before = last.step - (bar.count - 1 if is_full else 0)
            last.count, last.values = bar.count, dict(bar.values)
            last.step = last.before + bar.count
        self._between.discard(title)
        return Row(values, self._drawn[title].step, channel=f"bar:{title}", form="bar")

    def _is_anew(self, bar: Bar, title: str, last: _Drawn) -> bool:
        if bar.count != last.count:
            return bar.count < last.count
        is_redrawn = bar.values == last.values or (bar.count < bar.total)
        return not is_redrawn or title in self._between


def _untold(title: str) -> str:
    return re.sub(r"\d+", "", title)
