"""Read the score in a judge's answer. Stdlib only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from homeostat.errors import RewardError
from homeostat.rewards.problems import shorten


def read_score(answer: str, read: Mapping[str, Any]) -> float:
    """Return the number in an answer. Raises RewardError where there is none."""
    found = _by_pattern(answer, read) if read["type"] == "regex" else _by_field(answer, read)
    try:
        # Not a bool: true is no score. Texts such as "7" are what many models write.
        number = float(found) if not isinstance(found, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None or number != number:
        raise RewardError(f"no score can be read from the answer {shorten(answer, 200)!r}")
    return number


def _by_pattern(answer: str, read: Mapping[str, Any]) -> Any:
    matches = list(re.finditer(read["pattern"], answer))
    if not matches:
        return None
    last = matches[-1]
    return last.group(1 if last.re.groups else 0)


def _by_field(answer: str, read: Mapping[str, Any]) -> Any:
    """Return the field of the last JSON object that has it."""
    decoder, found, start = json.JSONDecoder(), None, answer.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            start = answer.find("{", start + 1)
            continue
        if isinstance(value, dict) and read["field"] in value:
            found = value[read["field"]]
        start = answer.find("{", end)
    return found
