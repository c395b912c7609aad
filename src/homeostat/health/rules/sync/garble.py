"""Whether a text is a mixture of scripts and fragments that nobody writes.

A garbled sample mixes letters of several scripts word by word, or is one character over and over.
Text in one foreign language, code and formulas are not garbled.
"""

from __future__ import annotations

import unicodedata

_MIN_WORDS = 6
_MIN_SCRIPTS = 3


def is_garbled(text: str) -> bool:
    """Three scripts or more within a few dozen words, or hardly any character at all."""
    words = text.split()[:60]
    plain = "".join(words)
    if len(plain) >= 24 and len(set(plain)) <= 2:
        return True
    scripts = {script for word in words if (script := _script(word))}
    return len(words) >= _MIN_WORDS and len(scripts) >= _MIN_SCRIPTS


def _script(word: str) -> str:
    """The script of a word's first letter; "" for what has none."""
    letter = next((char for char in word if char.isalpha()), "")
    name = unicodedata.name(letter, "") if letter else ""
    return name.split(" ")[0] if name else ""
