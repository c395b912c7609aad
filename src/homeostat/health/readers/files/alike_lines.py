"""Extract the values of JSON lines with the same layout, without creating an object for each line.

    {"step": 1, "loss": 0.5}     two lines
    {"step": 2, "loss": 0.25}
    {"step": , "loss": }         the pieces around the values, which every line has
    [1, 0.5, 2, 0.25]            the values, as one list

The quotation marks show where the pieces are. Each piece is compared byte by byte with that of the
first line and then overwritten with a comma and spaces, so that the parser only has to read
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from homeostat.arrays import IntArray
from homeostat.json_text import parse_json

# Separators of two values, and of a name and its value.
_SEPARATORS = ((b", ", b": "), (b",", b":"))


def values_of_alike(block: bytes, *, num_lines: int) -> tuple[list[str], bytearray] | None:
    """Return the names that all lines have, and the JSON text of a list of all lines' values.

    None if a line differs from the first one in more than its values. The values are not checked.
    If the parsed list has as many items as the lines have names together, and all items are
    numbers, each item is the value of one name.
    """
    names = _names_in(block.partition(b"\n")[0])
    # All line ends and quotation marks must be in the pieces, so values cannot contain any.
    marks = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord('"'))
    if len(marks) != 2 * len(names) * num_lines or not block.endswith(b"}"):
        return None
    for pieces in _pieces(names):
        if block.startswith(pieces[0]):
            text = _without(block, pieces, marks[::2].reshape(num_lines, len(names)))
            return (names, text) if text is not None else None
    return None


def num_lines_of(block: bytes) -> int:
    """Return the number of lines in a block whose last line has no line end.

    `bytes.count` compares single bytes, which would take a fifth of the time to read a log.
    """
    return int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))) + 1


def _names_in(line: bytes) -> list[str]:
    """Return the names in a line that is a JSON object; [] if it is anything else."""
    try:
        found = parse_json(line)
    except ValueError:
        return []
    return list(found) if isinstance(found, dict) else []


def _pieces(names: Sequence[str]) -> list[list[bytes]]:
    """Return the text before each value of a line, once for each style of separators."""
    quoted = [b'"%s"' % name.encode("utf-8", errors="replace") for name in names]
    return [
        [(between if place else b"{") + name + after for place, name in enumerate(quoted)]
        for between, after in _SEPARATORS
        if names
    ]


def _without(block: bytes, pieces: Sequence[bytes], marks: IntArray) -> bytearray | None:
    """Return the list of the texts between the pieces; None if a piece is missing anywhere.

    `marks` has the position of the first quotation mark of each name, a row for each line.
    """
    text = bytearray(block)
    for place, piece in enumerate(pieces):
        before = piece.index(b'"')
        if not _overwrite(text, marks[:, place] - before, piece, with_=b"," if place else b" "):
            return None
    # The piece at the start of each further line also has the end of the line before it.
    if not _overwrite(text, marks[1:, 0] - 3, b"}\n ", with_=b","):
        return None
    text[:1], text[-1:] = b"[", b"]"
    return text


def _overwrite(text: bytearray, places: IntArray, piece: bytes, *, with_: bytes) -> bool:
    """Overwrite the piece at all places and return True; return False if it is missing anywhere."""
    if len(places) and (places.min() < 0 or places.max() + len(piece) > len(text)):
        return False
    # An array with one overlapping item per byte of the text: the bytes from there on.
    count, kind = len(text) - len(piece) + 1, f"V{len(piece)}"
    items = np.ndarray((count,), dtype=kind, buffer=text, strides=(1,))
    if items[places].tobytes() != piece * len(places):
        return False
    items[places] = np.void(with_.ljust(len(piece)))
    return True
