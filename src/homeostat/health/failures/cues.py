"""Find the cues of a regular expression: short texts, at least one of which is in every match.

Searching for a text is much cheaper than compiling a pattern, and most patterns do not match. So a
pattern is compiled only if one of its cues is found.
"""

from __future__ import annotations

import re

# Tokens of a pattern, in this order: literal characters without a quantifier, an escape, a set, the
# start of a group, a flag for the whole pattern, a quantifier, any other character.
_TOKEN = re.compile(
    r"[^\\\[\](){}|^$.*+?]{1,200}(?![*+?{])|\\.|\[\^?\]?(?:\\.|[^\]\\]){0,200}\]"
    r"|\((?:\?(?:P<\w{1,40}>|<?[=!]|[a-z]{0,4}:))?(?!\?[a-z]{1,4}\))|\(\?[a-z]{1,4}\)"
    r"|\{\d{0,9},?\d{0,9}\}|.",
    re.DOTALL,
)
_MIN_CHARS = 3
_Cues = tuple[str, ...]


def cues_of(pattern: str) -> _Cues:
    """Return lower-case texts, one of which is in every match; () if there are none for certain."""
    return _Reading(pattern).branches()


class _Reading:
    """Read a regular expression once from start to end."""

    def __init__(self, pattern: str) -> None:
        self.tokens = _TOKEN.findall(pattern)
        self.place = 0

    def branches(self) -> _Cues:
        """Return the cues of all alternatives up to the end of the group."""
        found = [self._sequence()]
        while self.place < len(self.tokens) and self.tokens[self.place] == "|":
            self.place += 1
            found.append(self._sequence())
        # Skip the bracket that ends the group.
        self.place += 1
        return tuple(cue for cues in found for cue in cues) if all(found) else ()

    def _sequence(self) -> _Cues:
        """Return the cues of one alternative: of its part whose shortest cue is longest."""
        best: _Cues = ()
        run = ""
        while self.place < len(self.tokens) and self.tokens[self.place] not in "|)":
            token = self.tokens[self.place]
            self.place += 1
            inner: _Cues = ()
            is_group = token[0] == "(" and not token.endswith(")")
            if is_group:
                inner = self.branches()
            quantifier = self._quantifier()
            if text := "" if quantifier else _text(token):
                run += text
                continue
            best, run = _better(best, (run,)), ""
            if is_group and quantifier in ("", "+") and not token.startswith(_LOOKS):
                best = _better(best, inner)
        return _better(best, (run,))

    def _quantifier(self) -> str:
        """Skip a quantifier if one follows, and return its first character."""
        if self.place == len(self.tokens) or self.tokens[self.place][0] not in "*+?{":
            return ""
        found = self.tokens[self.place][0]
        self.place += 1
        # A second question mark only makes the quantifier lazy.
        if self.place < len(self.tokens) and self.tokens[self.place] == "?":
            self.place += 1
        return found


_LOOKS = ("(?=", "(?!", "(?<")


def _text(token: str) -> str:
    """Return the literal character of a token in lower case; "" if it is not a literal."""
    if token[0] == "\\":
        return "" if token[1].isalnum() else token[1]
    return "" if token[0] in "[(^$." else token.lower()


def _better(one: _Cues, other: _Cues) -> _Cues:
    least = max(min(map(len, one), default=0) + 1, _MIN_CHARS)
    return other if min(map(len, other), default=0) >= least else one
