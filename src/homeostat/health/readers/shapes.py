"""The prefilter of long logs: skip lines whose shape was already seen.

The *shape* of a line is the line with every digit as 0. How the readers interpret a line depends
only on its shape, and on what is open before it (a literal, a table, a completion). So while
nothing is open, a shape for which no reader had any use is not read again, and if the places of an
engine's numbers are known, they are taken from there. Lines without any of the signs by which a
reader recognises its own (`may_matter`, `is_sentence`) are never read at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ZEROS = bytes(ord("0") if 48 <= byte <= 57 else byte for byte in range(256))
# Words of events in any line, in lower case (traces.py).
_HINTS = (b"weight", b"memory", b"sleep", b"wake", b"skip", b"checkpoint", b"resum", b"restart")
# Signs of bars, mappings, quoted texts, tags, formats, engines.
_SIGNS = (
    b"%|", b"{", b"'", b'"', b"[prompt]", b"[response]", b"[completion]", b"[output]",
    b"[ground_truth]", b"[score]", b"[reward]", b"(train)", b"(val)", b"iter ", b"zero_advantage=",
    b"batch", b"throughput", b"metrics", b"\r", b"\x1b",
)  # fmt: skip
# A line of only these is a sentence: no number, name with a sign, quote or bracket is in it.
_SENTENCE = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;!?"
# Words after which a number may follow: those of headers and of mentions of a step.
_STEPS = (b"tep", b"ollout", b"teration", b"pisode")


@dataclass(frozen=True, slots=True)
class Shape:
    """The meaning of lines of a shape: an event, an unreadable row, an engine's numbers, or plain.

    `fields` has name, place of the number's first byte and after its last, and its divisor.
    """

    is_unread: bool = False
    is_event: bool = False
    fields: tuple[tuple[str, int, int, float], ...] = ()


PLAIN = Shape()


def is_sentence(line: bytes) -> bool:
    """Return whether a line is only words, and neither an event nor the head of a table."""
    if line.translate(None, _SENTENCE):
        return False
    low = line.lower()
    for hint in _HINTS:
        if hint in low:
            return False
    return not low.lstrip().startswith(b"step")


def may_matter(line: bytes, *, has_digits: bool, speaks: tuple[bytes, ...]) -> bool:
    """Return False if no reader could use a line while nothing is open.

    `speaks` are words of which a row of pairs has one.
    """
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
    """The shapes that were seen. Those that do not come again are dropped."""

    _MOST = 20_000
    _LONGEST = 1_000

    def __init__(self) -> None:
        self._new: dict[bytes, Shape] = {}
        self._old: dict[bytes, Shape] = {}

    def clear(self) -> None:
        """Forget all shapes: below a header, lines may mean something else."""
        self._new, self._old = {}, {}

    @staticmethod
    def key(line: bytes) -> bytes:
        return line.translate(_ZEROS)

    @staticmethod
    def keys(lines: Sequence[bytes]) -> list[bytes]:
        """Return the keys of many lines: one pass over all of them is faster than one over each."""
        return b"\n".join(lines).translate(_ZEROS).split(b"\n") if lines else []

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
