"""The prefilter of long logs: which lines need not be read, because lines like them were.

A line's *shape* is the line with every digit as 0. What the readers take a line for depends on its
shape alone, and on what is open before it (a literal, a table, a completion). So while nothing is
open, a shape that no reader had any use for needs no second look, and where it is known in which
places an engine's numbers stand, they are taken from there. Lines that hold none of the signs by
which any reader knows its own (`may_matter`, `is_sentence`) are not even read once.
"""

from __future__ import annotations

from dataclasses import dataclass

_ZEROS = bytes(ord("0") if 48 <= byte <= 57 else byte for byte in range(256))
# In any line, in lower case: the words of events (traces.py).
_HINTS = (b"weight", b"memory", b"sleep", b"wake", b"skip", b"checkpoint", b"resum", b"restart")
# Bars, mappings, quoted texts, tags, formats, engines.
_SIGNS = (
    b"%|", b"{", b"'", b'"', b"[prompt]", b"[response]", b"[completion]", b"[output]",
    b"[ground_truth]", b"[score]", b"[reward]", b"(train)", b"(val)", b"iter ", b"zero_advantage=",
    b"batch", b"throughput", b"metrics", b"\r", b"\x1b",
)  # fmt: skip
# A line of nothing else is a sentence: no number, name with a sign, quote or bracket is in it.
_SENTENCE = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;!?"
# Where a number may follow: the words of headers and of those who speak of a step.
_STEPS = (b"tep", b"ollout", b"teration", b"pisode")


@dataclass(frozen=True, slots=True)
class Shape:
    """What lines of a shape are: an event, like a row that nobody can read, an engine's numbers, or
    plain. `fields`: name, place of the number's first byte and behind its last, and its divisor."""

    is_unread: bool = False
    is_event: bool = False
    fields: tuple[tuple[str, int, int, float], ...] = ()


PLAIN = Shape()


def is_sentence(line: bytes) -> bool:
    """Whether a line is words alone, and says nothing that is an event or heads a table."""
    if line.translate(None, _SENTENCE):
        return False
    low = line.lower()
    for hint in _HINTS:
        if hint in low:
            return False
    return not low.lstrip().startswith(b"step")


def may_matter(line: bytes, *, has_digits: bool, speaks: tuple[bytes, ...]) -> bool:
    """False where no reader could have a use for a line while nothing is open. `speaks`: words of
    which a row of pairs has one."""
    if not line.isascii() or line[:1] in b" \t|-*+" or line[:1].isdigit():
        return True
    low = line.lower()
    for hint in _HINTS:
        if hint in low:
            return True
    for sign in _SIGNS:
        if sign in low:
            return True
    for word in _STEPS:
        if word in low and (has_digits or low.startswith(b"step")):
            return True
    if b":" not in low and b"=" not in low:
        return False
    if low.count(b".") >= 2:
        return True
    return any(word in low for word in speaks)


class Shapes:
    """Shapes that were met. Those that do not come again are dropped."""

    _MOST = 20_000
    _LONGEST = 1_000

    def __init__(self) -> None:
        self._new: dict[bytes, Shape] = {}
        self._old: dict[bytes, Shape] = {}

    def clear(self) -> None:
        """Forget all: a header was met, below which lines may mean something else."""
        self._new, self._old = {}, {}

    @staticmethod
    def key(line: bytes) -> bytes:
        return line.translate(_ZEROS)

    def get(self, key: bytes) -> Shape | None:
        found = self._new.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.add(key, found)
        return found

    def add(self, key: bytes, shape: Shape) -> None:
        if len(key) > self._LONGEST:
            return
        self._new[key] = shape
        if len(self._new) > self._MOST:
            self._old, self._new = self._new, {}
