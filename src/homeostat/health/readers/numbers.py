"""Parse numbers as logs print them.

    0.0159   '0.0159'   6,821,680,128.0   1e-06   nan   Infinity   12.5%   40.52s   5166.5 tokens/s
    np.float64(0.31)    tensor(0.5, device='cuda:0')

A percentage becomes a share. Other units are left to the framework's table: the number stays.

Repeats of NUMBER are possessive, as are those of all patterns that run over foreign text: there is
no backtracking, so a line costs time in proportion to its length, whatever it contains.
"""

from __future__ import annotations

import re
from typing import Any

NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?"
    r"|[-+]?(?:nan|NaN|NAN|inf|Inf|Infinity)(?![\w.])"
)
_WRAPPED = r"(?:(?:np|numpy|torch|jnp)\.)?(?:float|int|tensor|array)\d*\(\s*"
VALUE = rf"(?:{_WRAPPED})?(?:{NUMBER})"
# Longer texts are no numbers.
MAX_CHARS = 64
_WITH_UNIT = re.compile(
    rf"\s*(?:{_WRAPPED}(?P<inner>{NUMBER})[^()]*+\)|(?P<plain>{NUMBER}))\s*+"
    r"(?P<unit>%|(?!x[\da-fA-F])[A-Za-z\u00b5][\w./^ -]*+)?\s*+(?:\([^()]*+\))?\s*+"
)


def number(text: str) -> float | None:
    """Return the number that a text is, or None. The text may have a unit after the number."""
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
    """Return the number that a parsed value is: numbers, and texts that are numbers."""
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
    """Return with how many decimals a number was printed; None for an exponent or a word."""
    found = _WITH_UNIT.fullmatch(text) if len(text) <= MAX_CHARS else None
    if not found:
        return None
    digits = found["inner"] or found["plain"]
    if not digits[-1].isdigit() or "e" in digits.lower():
        return None
    decimals = len(digits.partition(".")[2])
    # A percentage becomes a share, which has two more decimals.
    return decimals + 2 if found["unit"] == "%" else decimals
