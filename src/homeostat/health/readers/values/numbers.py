"""Parse numbers as logs print them.

    0.0159   '0.0159'   6,821,680,128.0   1e-06   nan   Infinity   12.5%   40.52s   5166.5 tokens/s
    np.float64(0.31)    tensor(0.5, device='cuda:0')

A percentage is divided by 100. For other units the number stays as it is; the framework's table
scales it.

The quantifiers in NUMBER are possessive, like those of all patterns that are applied to foreign
text. Without backtracking, the time for a line is proportional to its length.
"""

from __future__ import annotations

import re
from typing import Any

NUMBER = (
    # 0,907 has a decimal comma: it is not 907.
    r"[-+]?(?!0,\d)(?:(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?"
    r"|[-+]?(?:nan|NaN|NAN|inf|Inf|Infinity)(?![\w.])"
)
_WRAPPED = r"(?:(?:np|numpy|torch|jnp)\.)?(?:float|int|tensor|array)\d*\(\s*"
VALUE = rf"(?:{_WRAPPED})?(?:{NUMBER})"
_TENSOR = re.compile(rf"\btensor\(\[*+(?P<value>{NUMBER})\]*+(?:,[^()<>]*+(?:<[^<>()]*+>)?)?\)")
# Longer texts are not numbers.
MAX_CHARS = 64
_WITH_UNIT = re.compile(
    rf"\s*(?:{_WRAPPED}(?P<inner>{NUMBER})[^()]*+\)|(?P<plain>{NUMBER}))\s*+"
    r"(?P<unit>%|(?!x[\da-fA-F])[A-Za-z\u00b5][\w./^ -]*+)?\s*+(?:\([^()]*+\))?\s*+"
)


def without_tensors(text: str) -> str:
    """Return a text with the numbers of printed tensors: tensor(0.5, device='cuda:0') -> 0.5."""
    return _TENSOR.sub(lambda found: found["value"], text)


def number(text: str) -> float | None:
    """Return the number in a text that is a number, possibly with a unit; None for other texts."""
    if len(text) > MAX_CHARS:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    found = _WITH_UNIT.fullmatch(text)
    if not found:
        return None
    value = float((found["inner"] or found["plain"]).replace(",", ""))
    return value / 100 if found["unit"] == "%" else value


def number_of(value: Any) -> float | None:
    """Return a parsed value as a number, also if it is a text that is a number; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return number(value)
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def decimals_of(text: str) -> int | None:
    """Return the number of decimals of a printed number; None for an exponent, nan or inf."""
    found = _WITH_UNIT.fullmatch(text) if len(text) <= MAX_CHARS else None
    if not found:
        return None
    digits = found["inner"] or found["plain"]
    if not digits[-1].isdigit() or "e" in digits.lower():
        return None
    decimals = len(digits.partition(".")[2])
    # Dividing a percentage by 100 adds two decimals.
    return decimals + 2 if found["unit"] == "%" else decimals
