"""Recognise lines about held-out rows whose metrics have the names of those of training.

    Epoch: 1, Valid, Loss: 1.548                 [Val] step 300 loss 2.1
    Validation result (greedy) at epoch 2, step 4500: bleu: 1.48, ppl: 20.5
    split=valid loss=2.3                         {'phase': 'val', 'loss': 2.1}

Such a word counts if it stands alone before the first metric, or is the value of a key such as
"split". As a part of a name ("val loss 2.1") it says what that number is, and no other one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from homeostat.health.readers.rows.row import Row, RowKind
from homeostat.health.readers.values.common_names import metric_of
from homeostat.health.readers.values.metric_words import is_of_one_part

_MAX_CHARS = 300
_WORD = (
    r"(?:val(?:id(?:ation|ate)?)?|eval(?:uation|uate)?|dev(?:elopment)?|test(?:ing)?"
    r"|held[ _-]?out)"
)
_WHAT = r"(?: (?:set|results?|metrics|phase|split|data|epoch|step|iter|stage|pass|summary))?"
_MARK = re.compile(
    rf"[\[(<]\s?{_WORD}{_WHAT}\s?[\])>]"
    # A piece of a line that separates its pieces: ", Valid,", " - val - ", "| Validation |".
    rf"|(?:^|[|,;:]\s{{0,4}}|\s-{{1,3}}\s)\s{{0,4}}{_WORD}{_WHAT}(?:\s?\([^()]{{0,30}}\))?\s{{0,4}}"
    r"(?=[|,;:]|\s-{1,3}\s)"
    # The first word of the line: "EVAL step=1", "Validation result ... at epoch 2", "eval 3 |".
    rf"|(?:^|[|,;:]\s{{1,4}}|\s-{{1,3}}\s){_WORD}"
    r"(?=\s{1,4}(?:\d|at |step|epoch|iter|results?|set\b|metrics|phase|round))"
    # "Epoch 3 validation:", "step 7 (eval)".
    rf"|\b(?:epoch|step|iter|iteration|round)\s?[:=#\[(]?\s?\d{{1,12}}(?:/\d{{1,12}})?\s?[\])]?"
    rf"\s{{1,2}}{_WORD}(?=\s?[:|-])"
    rf"|\b(?:split|phase|mode|stage|subset|partition|part|set)['\"]?\s?[:=]\s?['\"]?{_WORD}\b",
    re.IGNORECASE,
)
_KEYS = ("split", "phase", "mode", "stage", "subset", "partition", "part", "set")
_VALUE = re.compile(_WORD, re.IGNORECASE)
# Metrics that are no measurement on these rows.
_COMMON = frozenset({"epoch", "learning_rate", "time/step", "num_tokens"})
_TIMES = re.compile(r"time|duration|elapsed|speed|per[ _]s|/s\b|eta|mem", re.IGNORECASE)


def says_held_out(text: str) -> bool:
    """Return whether a text, up to a line's first metric, says that held-out rows follow."""
    return _MARK.search(text[:_MAX_CHARS]) is not None


def is_marked(mapping: Mapping[str, Any]) -> bool:
    """Return whether a mapping has a key that says that its metrics are of held-out rows."""
    values = (mapping.get(key) for key in _KEYS)
    return any(isinstance(one, str) and _VALUE.fullmatch(one.strip()) for one in values)


def as_held_out(row: Row) -> Row:
    """Rename the metrics of a row of held-out rows, so that they are not taken for training's.

    A name that says itself which rows it is about keeps its name.
    """
    if any(is_of_one_part(name) for name in row.values):
        return row
    row.kind = RowKind.EVAL
    row.values = {named_held_out(name): value for name, value in row.values.items()}
    row.fixed = {named_held_out(name): count for name, count in row.fixed.items()}
    return row


def named_held_out(name: str) -> str:
    """Return the name of a metric that was measured on held-out rows; times keep their name."""
    if metric_of(name) in _COMMON or _TIMES.search(name):
        return name
    return f"val_{name}"
