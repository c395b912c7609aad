"""The prefilter of long logs: skip lines whose shape was already seen.

The *shape* of a line is the line with every digit replaced by 0. The readers' result for a line
depends only on its shape and on what is open before it (a literal, a table, a completion). So while
nothing is open, a shape that no reader used is not read again. For lines of an engine, the
positions of the numbers are remembered and the numbers are taken from there. Lines with none of the
texts by which readers recognise their lines (`may_matter`, `is_sentence`) are never read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ZEROS = bytes(ord("0") if 48 <= byte <= 57 else byte for byte in range(256))
# Words of events, in lower case (traces.py). They count anywhere in a line.
_HINTS = (b"weight", b"memory", b"sleep", b"wake", b"skip", b"checkpoint", b"resum", b"restart")
# Texts that occur in mappings, quoted texts, tags, certain formats, and engines' lines.
_SIGNS = (
    b"{", b"'", b'"', b"[prompt]", b"[response]", b"[completion]", b"[output]",
    b"[ground_truth]", b"[score]", b"[reward]", b"(train)", b"(val)", b"iter ", b"zero_advantage=",
    b"batch", b"throughput", b"metrics", b"\x1b", b"homeostat", b"epoch ", b"wandb:", b" trl:",
    b" tel:",
)  # fmt: skip
# A line with only these characters is a sentence: it has no number, sign, quote or bracket.
_SENTENCE = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;!?"
# Hexadecimal numbers with letters, except at the start of a line, because its first character
# matters. Digits are 0 in a key already, so numbers without letters need no pattern.
_HEXADECIMAL = re.compile(rb"(?<=[^0-9A-Za-z_])(?=[a-f]*+0)(?=0*+[a-f])[0a-f]{4,}+(?![0-9A-Za-z_])")
# Words in rows of users' scripts, which may have no colons.
_RESULTS = (
    b"loss", b"reward", b"score", b"return", b"perplexity", b"ppl", b"nll", b"xent", b"entropy",
    b" ce", b"bpb", b"bpc", b"train", b"perte", b"verlust", b"perdida", b"perdita", b"perda",
)  # fmt: skip
# Beginnings of headers with commas.
_FIRST_CELLS = (b"step", b"global_step", b"iter", b"epoch")
# Ends of words in headers, and in sentences that mention a step; a number may follow.
_STEPS = (b"tep", b"ollout", b"teration", b"pisode")


@dataclass(frozen=True, slots=True)
class Shape:
    """The meaning of a shape: an event, a row that cannot be read, an engine's numbers, or nothing.

    `fields` has name, start, end and divisor of each number. `names` has only the names, and is the
    same object for all shapes with the same names.
    """

    is_unread: bool = False
    is_event: bool = False
    fields: tuple[tuple[str, int, int, float], ...] = ()
    names: frozenset[str] = frozenset()


PLAIN = Shape()


def is_sentence(line: bytes) -> bool:
    """Return whether a line is only words, and neither an event nor the header of a table."""
    if line.translate(None, _SENTENCE):
        return False
    low = line.lower()
    if any(map(low.__contains__, _HINTS)):
        return False
    return not (b"loss" in low and low.lstrip().startswith(b"step"))


def to_look_at(lines: Sequence[bytes], shapes: Sequence[Shape | None]) -> list[int]:
    """Return the indices of the lines that have no plain shape and are not sentences."""
    places = [place for place, shape in enumerate(shapes) if shape is not PLAIN]
    new = [place for place in places if shapes[place] is None]
    # One pass over all lines together is faster than one pass over each.
    signs = b"\n".join([lines[place] for place in new]).translate(None, _SENTENCE).split(b"\n")
    worded = [
        place for place, sign in zip(new, signs, strict=False) if not sign and lines[place].strip()
    ]
    text = b"\n".join([lines[place] for place in worded]).lower()
    if any(map(text.__contains__, _HINTS)) or b"loss" in text:
        worded = [place for place in worded if is_sentence(lines[place])]
    sentences = set(worded)
    return [place for place in places if place not in sentences]


def may_matter(line: bytes, *, has_digits: bool, speaks: tuple[bytes, ...]) -> bool:
    """Return False if no reader could use a line while nothing is open.

    A row of `name: number` pairs has at least one of the words `speaks`.
    """
    # Lines of redrawn bars are long, so they are recognised first.
    if b"\r" in line or b"%|" in line or not line.isascii():
        return True
    if line[:1] in b" \t|-*+" or line[:1].isdigit():
        return True
    low = line.lower()
    has = low.__contains__
    if any(map(has, _HINTS)) or any(map(has, _SIGNS)):
        return True
    if b"," in low and b"loss" in low and low.lstrip().startswith(_FIRST_CELLS):
        return True
    if any(map(has, _STEPS)) and (has_digits or (low.startswith(b"step") and b"loss" in low)):
        return True
    if has_digits and any(map(has, _RESULTS)):
        return True
    is_pairs = b":" in low or b"=" in low
    return is_pairs and (low.count(b".") >= 2 or any(map(has, speaks)))


def without_ids(key: bytes) -> bytes:
    """Return a line's key with every hexadecimal number in it replaced by a single 0.

    For `may_matter`, lines with the same result are alike, because none of the words that it
    searches is such a number or overlaps one.
    """
    return _HEXADECIMAL.sub(b"0", key)


class Shapes:
    """The shapes that were seen. Those that were not seen again for long are dropped."""

    _MOST = 20_000
    _LONGEST = 1_000

    def __init__(self) -> None:
        self._new: dict[bytes, Shape] = {}
        self._old: dict[bytes, Shape] = {}
        self._without_ids: set[bytes] = set()
        self.num_clears = 0

    def clear(self) -> None:
        """Forget all shapes, because below a header lines may have another meaning."""
        self._new, self._old = {}, {}
        self.num_clears += 1

    @staticmethod
    def key(line: bytes) -> bytes:
        return line.translate(_ZEROS)

    @staticmethod
    def keys(lines: Sequence[bytes]) -> list[bytes]:
        """Return the keys of many lines. One pass over all of them is faster than one over each."""
        return b"\n".join(lines).translate(_ZEROS).split(b"\n") if lines else []

    def get(self, key: bytes) -> Shape | None:
        found = self._new.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.add(key, found)
        return found

    def get_all(self, keys: Sequence[bytes]) -> list[Shape | None]:
        """Return the shapes of many keys; None for new ones and for those not seen recently."""
        return list(map(self._new.get, keys))

    def is_known_plain(self, key: bytes) -> bool:
        """Return whether a line that no reader uses differed from this one only in ids."""
        # Long lines are not remembered, and searching them for ids takes long.
        return len(key) <= self._LONGEST and without_ids(key) in self._without_ids

    def add_plain(self, key: bytes) -> None:
        """Remember a line that no reader uses, whatever was printed before it."""
        if len(key) > self._LONGEST:
            return
        short = without_ids(key)
        if short == key:
            self.add(key, PLAIN)
        else:
            if len(self._without_ids) >= self._MOST:
                self._without_ids = set()
            self._without_ids.add(short)

    def add(self, key: bytes, shape: Shape) -> None:
        if len(key) > self._LONGEST:
            return
        self._new[key] = shape
        if len(self._new) > self._MOST:
            self._old, self._new = self._new, {}
