"""Recognise texts that are a mixture of scripts and fragments that nobody writes.

A garbled sample mixes letters of several scripts word by word, holds tokens that no text has (pads,
bytes that are no letter), or is one character over and over. Text in one foreign language, code and
formulas are not garbled.
"""

from __future__ import annotations

import re
import unicodedata

_MIN_WORDS = 6
_MIN_SCRIPTS = 3
# What tokenizers hold and texts do not: pads, unknowns, single bytes, letters of byte encodings.
_ODD = re.compile(
    r"<\|[a-z_]{0,40}?pad[a-z_]{0,40}+\|>|<unk>|<pad>|<0x[0-9A-Fa-f]{2}>|\[PAD|<\|reserved|<unused\d"
    r"|\ufffd|\u0120|\u010a|\u00c3[\u0080-\u00bf]|\u00c2[\u0080-\u00bf]"
)


def is_garbled(text: str) -> bool:
    """Three scripts or more within a few dozen words, or hardly any character at all."""
    words = text.split()[:60]
    plain = "".join(words)
    if len(plain) >= 24 and len(set(plain)) <= 2:
        return True
    scripts = {script for word in words if (script := _script(word))}
    if len(words) >= _MIN_WORDS and len(scripts) >= _MIN_SCRIPTS:
        return True
    return len(words) >= 4 and len(scripts) >= 2 and any(_ODD.search(word) for word in words)


def _script(word: str) -> str:
    """The script of a word's first letter; "" for what has none."""
    letter = next((char for char in word if char.isalpha()), "")
    name = unicodedata.name(letter, "") if letter else ""
    return name.split(" ")[0] if name else ""
