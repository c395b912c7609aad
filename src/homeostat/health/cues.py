"""Find the cues of a regular expression: texts of which every match contains at least one.

Looking for texts is far cheaper than compiling a pattern, and most patterns do not match.
"""

from __future__ import annotations

import re

# Parts of a pattern: characters that stand for themselves and are not repeated, an escape, a set,
# the beginning of a group, a flag for the whole pattern, a quantifier, any other character.
_TOKEN = re.compile(
    r"[^\\\[\](){}|^$.*+?]{1,200}(?![*+?{])|\\.|\[\^?\]?(?:\\.|[^\]\\]){0,200}\]"
    r"|\((?:\?(?:P<\w{1,40}>|<?[=!]|[a-z]{0,4}:))?(?!\?[a-z]{1,4}\))|\(\?[a-z]{1,4}\)"
    r"|\{\d{0,9},?\d{0,9}\}|.",
    re.DOTALL,
)
_MIN_CHARS = 3
_Cues = tuple[str, ...]


def cues_of(pattern: str) -> _Cues:
    """Return texts in small letters, one of which every match contains; () if none is sure."""
    return _Reading(pattern).branches()


class _Reading:
    """A regular expression, read once from its beginning to its end."""

    def __init__(self, pattern: str) -> None:
        self.tokens = _TOKEN.findall(pattern)
        self.place = 0

    def branches(self) -> _Cues:
        """Return the cues of everything up to the end of the group, of all its branches."""
        found = [self._sequence()]
        while self.place < len(self.tokens) and self.tokens[self.place] == "|":
            self.place += 1
            found.append(self._sequence())
        # The bracket that ends the group.
        self.place += 1
        return tuple(cue for cues in found for cue in cues) if all(found) else ()

    def _sequence(self) -> _Cues:
        """Return the cues of one part of a branch: the part whose shortest cue is the longest."""
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
        """Skip a quantifier, if one comes now, and return how it begins."""
        if self.place == len(self.tokens) or self.tokens[self.place][0] not in "*+?{":
            return ""
        found = self.tokens[self.place][0]
        self.place += 1
        # A second question mark makes the quantifier match as little as possible.
        if self.place < len(self.tokens) and self.tokens[self.place] == "?":
            self.place += 1
        return found


_LOOKS = ("(?=", "(?!", "(?<")


def _text(token: str) -> str:
    """Return what a token stands for, in small letters; empty if it is not a text."""
    if token[0] == "\\":
        return "" if token[1].isalnum() else token[1]
    return "" if token[0] in "[(^$." else token.lower()


def _better(one: _Cues, other: _Cues) -> _Cues:
    least = max(min(map(len, one), default=0) + 1, _MIN_CHARS)
    return other if min(map(len, other), default=0) >= least else one
