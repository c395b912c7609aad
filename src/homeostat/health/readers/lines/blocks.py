"""Parse tables, and metrics printed over several lines below a header with the step.

====== Step 31/500 ======              === [global_reduce] - METRICS STEP 4 ===
  * Loss: -0.0091                        grpo_loss/kl_divergence_mean: 1,568,987.96
  * generation: 43.55s (48.0%)
[batch=10/1000]:                         (Composer)
     Train loss/train/total: 2.3120
Step   Training Loss   reward            | actor/loss | 0.12 |  (drawn)
1      0.000000        0.125000          | reward     | 0.50 |
| Training Loss | Epoch | Step | Validation Loss |            epoch,train_loss,val_loss
| 0.61          | 1.0   | 500  | 0.58            |            1,0.61,0.58
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from homeostat.health.readers.rows.row import Row
from homeostat.health.readers.values.common_names import sounds_like_metric
from homeostat.health.readers.values.numbers import VALUE, decimals_of, number

_HEADER = re.compile(
    r"^[^\w]*(?:\[[\w .-]{1,60}+\][\s-]*+)?(?:metrics\s++)?(?:global[ _-]?)?"
    r"(?P<word>step|iteration|rollout|episode)\s*+(?:[:#]\s*+)?(?P<step>\d{1,15})"
    r"(?:\s*+/\s*+(?P<total>\d{1,15}))?[^\w]*+$",
    re.IGNORECASE,
)
_COMPOSER = re.compile(r"\[batch=(?P<step>\d{1,15})/(?P<total>\d{1,15})\]:\s*+")
_BULLET = re.compile(
    rf"^(?:\s*+[\u2022\u00b7*\u25cf-]\s++|\s{{2,}}+)(?P<name>[A-Za-z][^:=*+$]{{0,120}}+)\s*+[:=]\s*+"
    rf"(?P<value>{VALUE}\s*+[^\s\d,:(]{{0,20}})(?:\s*+\([^()]*+\))?\s*+$"
)
# Possessive quantifiers: each run of spaces is matched only once, from its first space on.
_CELLS = re.compile(r"(?:(?<!\s)\s++)?\|\s*+|\t|\s{2,}+")
# Notebooks print rewards/format/mean as "rewards / format / mean".
_SPACED_SLASH = re.compile(r"(?<=\w) / (?=\w)")
_NAMED_CELLS = re.compile(r"\bTraining Loss\b|\bValidation Loss\b|\S+")
# Names with more words are sentences: completions also count their steps.
_MAX_WORDS = 6
_NO_VALUE = frozenset({"no log", "n/a", "-", "", "none"})
_VALIDATED, _OF_TRAINING = "Validation Loss", ("Training Loss", "Step", "Epoch")


class Blocks:
    """Parse the metrics below a header, whose step is remembered."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._form = "block"

    def header(self, body: str) -> tuple[int, int | None] | None:
        """Return the step and total of a line that is only a step's header; None for others."""
        if len(body) > 200 or not (
            "[batch=" in body
            or "tep" in body
            or "TEP" in body
            or "teration" in body
            or "ollout" in body
            or "pisode" in body
        ):
            return None
        found = _HEADER.match(body) or _COMPOSER.fullmatch(body)
        if not found:
            return None
        self.step = int(found["step"])
        if "METRICS STEP" in body:
            self._form = "forge"
        elif body.startswith("=="):
            self._form = "nemo"
        elif body.startswith("[batch="):
            self._form = "composer"
        return self.step, int(found["total"]) if found["total"] else None

    def may_be_row(self, body: str) -> bool:
        """Return whether a line looks like a metric below the header, whatever its number is."""
        return self.step is not None and len(body) <= 400 and _BULLET.match(body) is not None

    def row(self, body: str) -> Row | None:
        """Return one metric below the header as a row; None if the line is none."""
        if self.step is None or len(body) > 400:
            return None
        found = _BULLET.match(body)
        value = number(found["value"].strip()) if found else None
        if found is None or value is None:
            return None
        name = found["name"].strip()
        if self._form == "composer":
            name = name.removeprefix("Train ").removeprefix("Eval ")
        if name.count(" ") >= _MAX_WORDS:
            return None
        row = Row({name: value}, self.step, form=self._form)
        count = decimals_of(found["value"].strip())
        if count is not None:
            row.fixed[name] = count
        return row


# The first word of a header: notebooks count steps, fastai epochs.
_FIRST_NAMES = ("step", "epoch")
# The first name of a header with commas.
_COUNTED = frozenset({"step", "global_step", "iter", "iteration", "epoch"})
# A word that begins with a digit is a value; "F1" and "ROUGE-1" are names.
_NO_HEADER = re.compile(r"[:=]|(?:^|\s)[-+.]?\d")


class Tables:
    """Parse tables with a column of steps: of notebooks and model cards, or with commas."""

    def __init__(self) -> None:
        self._names: list[str] = []
        # Index of the column of steps, and whether commas separate cells.
        self._step = 0
        self._has_commas = False

    def may_be_row(self, body: str) -> bool:
        """Return whether a line looks like a row of the open table, whatever its numbers are."""
        return bool(self._names) and body.lstrip(" \t|")[:1].isdigit()

    def row(self, body: str) -> Row | None:
        if body.lstrip()[:1] in {"\u2502", "\u2503"}:
            return _drawn(body)
        is_piped = body.lstrip()[:1] == "|"
        line = body.strip().strip("|").strip()
        if self._opens(line, is_piped=is_piped):
            return Row({}, form="table")
        if not self._names or not (line[:1].isdigit() or (is_piped and _is_empty(line))):
            return None
        cells = _by_commas(line) if self._has_commas else _CELLS.split(line)
        if len(cells) != len(self._names) and not (self._has_commas or is_piped):
            cells = line.split()
        if len(cells) != len(self._names):
            return None
        step = cells[self._step].replace(",", "")
        if not step.isdecimal():
            return None
        row = Row({}, int(step[:15]), form="table")
        for place, (name, cell) in enumerate(zip(self._names, cells, strict=True)):
            value = None if cell.lower() in _NO_VALUE or place == self._step else number(cell)
            if value is not None:
                row.values[name] = value
                row.fixed[name] = decimals_of(cell) or 9
        return row if row.values else None

    def _opens(self, line: str, *, is_piped: bool) -> bool:
        """Note the columns that a header names. Return whether the line is one."""
        low = line.lower()
        if "loss" not in low or len(line) > 2_000 or _NO_HEADER.search(line):
            return False
        names = _by_commas(line)
        has_commas = names[0].lower() in _COUNTED and all(len(one.split()) <= 3 for one in names)
        if has_commas and len(names) > 1:
            step = 0
        else:
            names, has_commas = _names(line), False
            step = _place_of_step(names) if is_piped or low.startswith(_FIRST_NAMES) else -1
        if step < 0 or len(names) < 2 or not any("loss" in name.lower() for name in names):
            return False
        self._names, self._step, self._has_commas = names, step, has_commas
        return True


def _by_commas(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _place_of_step(names: Sequence[str]) -> int:
    """Return the index of the column of steps, or else of epochs; -1 if there is none."""
    lower = [name.lower() for name in names]
    if lower[0].startswith(_FIRST_NAMES):
        return 0
    return next((lower.index(name) for name in _FIRST_NAMES if name in lower), -1)


def _is_empty(line: str) -> bool:
    """Return whether the first cell of a row says that there is no value."""
    return line.partition("|")[0].strip().lower() in _NO_VALUE


def _drawn(body: str) -> Row | None:
    """Parse a line of a table with box characters whose cells alternate between name and number."""
    cells = [cell.strip() for cell in re.split("[\u2502\u2503]", body)[1:-1]]
    if len(cells) % 2 or len(body) > 2_000:
        return None
    row = Row({}, form="drawn")
    for name, text in zip(cells[::2], cells[1::2], strict=True):
        value = number(text)
        if value is None or ("/" not in name and not sounds_like_metric(name)):
            return None
        row.values[name] = value
    return row if row.values else None


def _names(line: str) -> list[str]:
    # Trainers put spaces around the slash of a name, so that a narrow column can break there.
    line = _SPACED_SLASH.sub("/", line)
    names = [name for name in _CELLS.split(line) if name]
    names = names if len(names) > 1 else _NAMED_CELLS.findall(line)
    return list(map(_evaluated, names)) if _VALIDATED in names else names


def _evaluated(name: str) -> str:
    """Return a column's name as transformers logs it: its notebook tables show `eval_nll_loss` as
    `Nll Loss`, beside `Validation Loss`.
    """
    if name == _VALIDATED or name in _OF_TRAINING or not name[:1].isupper():
        return name
    return "eval_" + name.lower().replace(" ", "_")
