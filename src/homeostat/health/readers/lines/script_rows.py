"""Parse rows of metrics that a user's own script prints: many lines of the same form.

    epoch 3 loss 1.85                                  [ 120/5000] loss 2.31 lr 1e-4
    | epoch 1 | 200/ 2983 batches | loss 7.1 |         Loss at step 40: 2.1
    INFO:root:Epoch 3 Training Loss 0.52               Episode 12   Average Score: 31.5

The form of a line is the line with its numbers left open. A single such line may be a sentence. A
form is a row of metrics if it comes at least `MIN_ROWS` times and has the name of a loss or reward.
The text before a number is its name. Steps come from a counter that only increases; if there is
none, rows are counted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from homeostat.health.readers.lines.held_out import says_held_out
from homeostat.health.readers.lines.languages import in_english
from homeostat.health.readers.lines.line_parts import is_transition
from homeostat.health.readers.lines.number_names import (
    OF_EPISODES,
    last_part,
    last_words,
    metric_in,
    named,
)
from homeostat.health.readers.values.common_names import folded, metric_of
from homeostat.health.readers.values.metric_words import is_of_one_part, loss_of_rows
from homeostat.health.readers.values.numbers import NUMBER, decimals_of
from homeostat.health.view import Series

FORM = "script"
MIN_ROWS = 4
# Factor by which rows of scripts must outnumber those of a known format that say the same.
_MUCH_DENSER = 4
# Number of rows that are needed if a row has several losses, and if no counter is printed.
_MIN_OF_SEVERAL = 2
_MIN_UNCOUNTED = 6
_MAX_CHARS = 400
_MAX_FORMS = 200
_MAX_NUMBERS = 40
_MAX_ROWS = 200_000
# Rows that tell how many decimals are printed.
_MAX_FOR_DECIMALS = 2_000
# A row has one of these words, or the name of its rows right before a number ("train 2.1").
_SPEAKS = ("loss", "cost", "rew", "score", "return", "perplexity", "ppl", "nll", "xent", "entropy",
           "ce", "bpb", "bpc")  # fmt: skip
_NAMES_ROWS = re.compile(r"\btrain(?:ing)?[\s:=]{1,3}\d", re.IGNORECASE)
_NUMBER = re.compile(rf"(?<![A-Za-z_.\d])(?:{NUMBER})")
# A line that begins with one of these reports held-out data.
_HELD_OUT = re.compile(r"\b(?:eval(?:uation|uating)?|val(?:id(?:ation)?)?|dev)\b", re.IGNORECASE)
_OPEN = "\0"
_SPACES = re.compile(r" +")
# What older tutorials call the loss. Elsewhere a cost may be money, so an epoch must be counted.
_COST = frozenset({"cost", "avg_cost", "average_cost", "train_cost"})
_AT = frozenset({"at", "after", "in", "for", "of"})
# What stands between a count and the value of the metric that was named before the count.
_BEFORE_WAITED = frozenset({"", ":", "=", "is", ")", "):", ") =", ")="})
_TRAINED = frozenset({"train/loss", "reward"})
_RESULTS = _TRAINED | {"eval/loss", "train/perplexity", "eval/perplexity"}


@dataclass(slots=True)
class _Form:
    """The numbers of a form: their names ("" for none), which are counters, and all rows."""

    names: list[str]
    # For each number its rank among the counters; None if it is not a counter.
    counters: list[int | None]
    totals: dict[int, int]
    rows: list[list[float]] = field(default_factory=list)
    # For each number the decimals with which it is printed; None if they vary.
    decimals: list[int | None] = field(default_factory=list)
    # Whether numbers are named only by their rows ("train 2.1 val 2.3"), so they may be accuracies.
    is_unsaid: bool = False
    # The index of a number that only says its rows beside a named loss: "loss 2.1 (val 2.3)".
    beside: int | None = None


class ScriptRows:
    """Collect lines that may be rows, grouped by form."""

    def __init__(self) -> None:
        self._forms: dict[str, _Form] = {}

    def take(self, body: str) -> bool:
        """Collect a line. Return whether it may be a row."""
        if len(body) > _MAX_CHARS or _OPEN in body:
            return False
        body = in_english(body)
        if not _speaks(body):
            return False
        if is_transition(body):
            return False
        # Counts are padded to the width of the largest one.
        key = _SPACES.sub(" ", _NUMBER.sub(_OPEN, body))
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= _MAX_FORMS:
                self._drop_rare()
            form = self._forms[key] = _form_of(key)
        if not any(form.names):
            return False
        texts = _NUMBER.findall(body)
        form.rows.append([_value(text) for text in texts])
        if len(form.rows) > _MAX_ROWS:
            # If there are so many rows, half of them are enough.
            form.rows = form.rows[::2]
        if len(form.rows) <= _MAX_FOR_DECIMALS:
            form.decimals = _same(form.decimals, [decimals_of(text) for text in texts])
        return True

    def _drop_rare(self) -> None:
        """Drop the forms that came only once, which most sentences do."""
        self._forms = {key: form for key, form in self._forms.items() if len(form.rows) > 1}
        if len(self._forms) >= _MAX_FORMS:
            fewest = min(self._forms, key=lambda key: len(self._forms[key].rows))
            del self._forms[fewest]

    def series(self) -> dict[str, Series]:
        """Return the metrics of all forms that are rows. If names collide, use the longer form."""
        found: dict[str, Series] = {}
        self._forms = _joined(self._forms)
        for form in sorted(self._forms.values(), key=lambda one: -len(one.rows)):
            if not _is_row(form):
                continue
            form.rows = _of_last_run(form)
            values, steps = np.array(form.rows, dtype=np.float64), _steps(form)
            if form.beside is not None and not _is_loss_like(form, values):
                form.names[form.beside] = ""
            for place, name in enumerate(form.names):
                if name and name not in found:
                    found[name] = Series(steps, np.ascontiguousarray(values[:, place]))
        return found

    def decimals(self) -> dict[str, int]:
        """Return the number of decimals of each metric for which it was always the same."""
        forms = sorted(filter(_is_row, self._forms.values()), key=lambda one: len(one.rows))
        return {
            name: count
            for form in forms
            for name, count in zip(form.names, form.decimals, strict=False)
            if name and count is not None
        }

    def is_better_than(self, series: Mapping[str, Series], *, forms: Collection[str] = ()) -> bool:
        """Return whether to use these rows in place of the series that known formats found in the
        log.

        A run may print other numbers under the same names, such as one per sample. So rows of a
        known format take precedence, unless there are hardly any, or they are only pairs of a name
        and a number, and these rows have more of the losses and rewards.
        """
        if _num_results(series) >= MIN_ROWS:
            own = self.series() if set(forms) == {"pairs"} else {}
            is_more = _num_results(own) >= _num_results(series)
            is_denser = _num_results(own) >= _MUCH_DENSER * _num_results(series)
            if _results(own) == _results(series):
                return is_denser
            return _results(own) > _results(series) and is_more
        own = self.series()
        if not series:
            return bool(own)
        if not any(map(_counter_is_there, self._forms.values())):
            return False
        if _num_results(own) or _num_results(series):
            return _num_results(own) >= MIN_ROWS
        # A log of evaluations alone.
        most = _num_results(series, among=_RESULTS)
        return _num_results(own, among=_RESULTS) >= max(MIN_ROWS, _MUCH_DENSER * most)

    def total_steps(self) -> int | None:
        """Return the total that is printed with the counter of the longest form."""
        forms = [form for form in self._forms.values() if _is_row(form)]
        longest = max(forms, key=lambda form: len(form.rows), default=None)
        place = _counter_of(longest) if longest is not None else None
        if longest is None or place is None or place not in longest.totals:
            return None
        totals = {row[longest.totals[place]] for row in longest.rows}
        total = totals.pop()
        return int(total) if not totals and 0 < total < 1e15 and total.is_integer() else None


def _speaks(body: str) -> bool:
    low = body.lower()
    for word in _SPEAKS:
        if word in low:
            return True
    return "train" in low and _NAMES_ROWS.search(body) is not None


def _joined(forms: Mapping[str, _Form]) -> dict[str, _Form]:
    """Combine forms that differ only after their last number, such as by a mark of the best score.

    Their rows must have exactly one counter, and no count may occur twice.
    """
    found: dict[str, _Form] = {}
    heads: dict[str, str] = {}
    for key, form in forms.items():
        head = key.rpartition(_OPEN)[0]
        first = found.get(heads.setdefault(head, key))
        places = [place for place, rank in enumerate(form.counters) if rank is not None]
        if first is None or first is form or len(places) != 1:
            found[key] = form
            continue
        rows = sorted([*first.rows, *form.rows], key=lambda row: row[places[0]])
        if any(a[places[0]] == b[places[0]] for a, b in pairwise(rows)):
            found[key] = form
            continue
        first.rows, first.decimals = rows, _same(first.decimals, form.decimals)
    return found


def _results(series: Iterable[str]) -> frozenset[str]:
    """Return which of the losses and rewards are among these metrics."""
    return _RESULTS.intersection(metric_of(name) for name in series)


def _num_results(series: Mapping[str, Series], *, among: Collection[str] = _TRAINED) -> int:
    """Return the number of records of the loss or reward that was logged most often."""
    names = (name for name in series if metric_of(name) in among)
    return max((len(series[name]) for name in names), default=0)


def _same(known: list[int | None], new: list[int | None]) -> list[int | None]:
    if not known:
        return new
    return [a if a == b else None for a, b in zip(known, new, strict=True)]


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _is_row(form: _Form) -> bool:
    """Return whether a form came often enough and, if it has counters, one of them changes."""
    if form.is_unsaid and not _falls(form, "train_loss"):
        return False
    counts = [place for place, rank in enumerate(form.counters) if rank is not None]
    if not counts:
        return len(form.rows) >= _MIN_UNCOUNTED
    is_counting = any(len({row[place] for row in form.rows}) > 1 for place in counts)
    is_several = len({"train/loss", "eval/loss"} & set(map(metric_of, form.names))) > 1
    return is_counting and len(form.rows) >= (_MIN_OF_SEVERAL if is_several else MIN_ROWS)


def _falls(form: _Form, name: str) -> bool:
    """Return whether a number falls from the first rows to the last, as no accuracy does."""
    values = [row[form.names.index(name)] for row in form.rows]
    part = max(1, len(values) // 3)
    return sum(values[-part:]) < sum(values[:part])


def _counter_is_there(form: _Form) -> bool:
    return _is_row(form) and _counter_of(form) is not None


def _counter_of(form: _Form) -> int | None:
    """Return the index of the finest counter that only increases; None if there is none."""
    ranked = [(rank, place) for place, rank in enumerate(form.counters) if rank is not None]
    for _, place in sorted(ranked):
        counts = [row[place] for row in form.rows]
        if all(a < b for a, b in pairwise(counts)) and _are_whole(counts):
            return place
    return None


def _of_last_run(form: _Form) -> list[list[float]]:
    """Return the rows after the coarsest counter last went back to its start, where a new run
    began.

    If there are too few of them, return all rows.
    """
    ranked = [(rank, place) for place, rank in enumerate(form.counters) if rank is not None]
    if not ranked:
        return form.rows
    _, place = max(ranked)
    counts = [row[place] for row in form.rows]
    starts = [at for at in range(1, len(counts)) if counts[at - 1] > counts[at] <= counts[0]]
    kept = form.rows[starts[-1] :] if starts else form.rows
    return kept if len(kept) >= MIN_ROWS else form.rows


def _are_whole(counts: Sequence[float]) -> bool:
    return all(0 <= count < 1e15 and count.is_integer() for count in counts)


def _steps(form: _Form) -> np.ndarray:
    place = _counter_of(form)
    if place is None:
        return np.arange(1, len(form.rows) + 1, dtype=np.int64)
    return np.array([int(row[place]) for row in form.rows], dtype=np.int64)


def _form_of(key: str) -> _Form:
    """Name the numbers of a form by the text before each of them."""
    texts = key.split(_OPEN)[:-1][:_MAX_NUMBERS]
    is_episodic = "episode" in key.lower()
    is_of_epochs = key.lstrip(" \t[|").lower().startswith("epoch")
    is_held_out = _is_held_out(texts)
    form = _Form([], [], {})
    waiting = ""
    for place, text in enumerate(texts):
        name, rank = named(text)
        if text.strip() == "/" and place and form.counters[place - 1] is not None:
            form.totals[place - 1] = place
        elif (
            rank is None
            and not name
            and text.rstrip().endswith("[")
            and (_follows_total(texts, place) or _is_alone(texts, place))
        ):
            # [120/5000] is a counter without a name, and so is [120] at the start of a line.
            rank = 0
        if rank is not None:
            waiting, name = _waiting(text), ""
        elif not name and waiting and text.strip() in _BEFORE_WAITED:
            name, waiting = waiting, ""
        if folded(name) in OF_EPISODES:
            name = "reward" if is_episodic or folded(name) == "reward" else ""
        if not name and is_of_epochs and folded(last_part(text)) in _COST:
            name = "loss"
        is_plain = metric_of(name) in {"train/loss", "train/perplexity"}
        if is_held_out and is_plain and not is_of_one_part(name):
            name = "eval_loss" if metric_of(name) == "train/loss" else "eval_ppl"
        form.names.append(name if name not in form.names else "")
        form.counters.append(rank)
    found = {metric_of(name) for name in form.names if name}
    if "train/loss" in found and "eval/loss" not in found:
        form.beside = next((at for at, text in enumerate(texts) if _says_only_val(text)), None)
        if form.beside is not None and not form.names[form.beside]:
            form.names[form.beside] = "val_loss"
    elif not found & _RESULTS:
        form.names = [_unsaid(text) or name for text, name in zip(texts, form.names, strict=True)]
        form.is_unsaid = True
        if not {"train_loss", "val_loss"} <= set(form.names):
            return _Form([], [], {})
    return form


def _is_held_out(texts: Sequence[str]) -> bool:
    """Return whether the text before the first metric says that held-out rows follow."""
    if not texts:
        return False
    if _HELD_OUT.search(texts[0]) is not None:
        return True
    first = next((place for place, text in enumerate(texts) if named(text)[0]), 0)
    return says_held_out("0".join(texts[: first + 1]))


def _waiting(text: str) -> str:
    """Return the metric whose value follows its count: "Loss at step 4: 2", "Loss (step 4): 2"."""
    head, bracket, _ = text.rpartition("(")
    if bracket:
        return metric_in(last_words(head))
    words = last_words(text)
    return metric_in(words[:-2]) if len(words) > 2 and words[-2].lower() in _AT else ""


def _says_only_val(text: str) -> bool:
    """Return whether a number is called "val" and nothing else, as "best val" would be."""
    words = last_words(text)
    return len(words) == 1 and loss_of_rows(words[0]) == "val_loss"


def _is_loss_like(form: _Form, values: np.ndarray) -> bool:
    """Return whether a number beside the loss is one as well, and no accuracy, by its size."""
    place = next(at for at, name in enumerate(form.names) if metric_of(name) == "train/loss")
    part = max(1, len(values) // 3)
    own, other = values[:part, form.beside].mean(), values[:part, place].mean()
    return bool(values[:, form.beside].max() > 1.0 and other / 2 <= own <= 2 * other)


def _unsaid(text: str) -> str:
    """Return the loss that is called by its rows alone: "train" or "val" before a number."""
    words = last_words(text)
    return (loss_of_rows(words[-1]) or "") if words else ""


def _follows_total(texts: Sequence[str], place: int) -> bool:
    return place + 1 < len(texts) and texts[place + 1].strip() == "/"


def _is_alone(texts: Sequence[str], place: int) -> bool:
    return place == 0 and texts[0].strip() == "[" and len(texts) > 1 and texts[1][:2] == "] "
