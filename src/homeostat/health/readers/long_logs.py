"""Read long console logs from bytes: lines of a shape that was seen before are not read again.

    lines -> shapes -> plain: only kept, in blocks | an engine's numbers | everything else: text.py

The result is the one that TextReader gives for the same lines. How that can be is in shapes.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from homeostat.health.readers import line_rows
from homeostat.health.readers.engine_lines import fields_in
from homeostat.health.readers.kept_lines import visible
from homeostat.health.readers.line_parts import bare, last_drawing
from homeostat.health.readers.recorder import Recorder
from homeostat.health.readers.shapes import (
    PLAIN,
    Shape,
    Shapes,
    is_sentence,
    may_matter,
    to_look_at,
)
from homeostat.health.readers.text import MAX_SETTINGS, TextReader
from homeostat.health.readers.traces import MAX_EVENTS

_SPEAKS = tuple(word.encode() for word in line_rows.SPEAKS)
# A line of these may begin a table, whose lines mean something only within it.
_RULE = b"-" * 12
# Number of lines whose shapes are looked up at once; few where headers often change what they mean.
_MIN_WINDOW, _MAX_WINDOW = 64, 2_048


class LongLogReader(TextReader):
    """Take in a log's lines in order, as bytes. The results are in its attributes."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        super().__init__(recorder)
        self._shapes = Shapes()
        self._window = _MAX_WINDOW
        # What engines print about: the same names are one object, whose hash is computed once.
        self._engine_names: dict[frozenset[str], frozenset[str]] = {}

    def feed_bytes(self, lines: Sequence[bytes]) -> None:
        """Take in lines as a file holds them. Lines of a known shape are not parsed."""
        start, keys = 0, None
        while start < len(lines):
            is_open = self._num_kept < MAX_SETTINGS or self._is_open
            if is_open or self.recorder.newest is None:
                # Every line may be a setting or a part of an open item, or is counted by itself.
                self._number += 1
                self._feed_one(lines[start], is_open=is_open)
                start += 1
            else:
                if keys is None:
                    keys = self._shapes.keys(lines)
                end = start + self._window
                start += self._feed_many(lines[start:end], keys[start:end])

    def _feed_one(self, line: bytes, *, is_open: bool) -> None:
        """Take in one line, whatever was printed before it."""
        if is_open:
            self._feed_line(visible(line))
            return
        if not line or line.isspace():
            return
        key = self._shapes.key(line)
        shape = self._shapes.get(key)
        if shape is None and not is_sentence(line):
            if self._may_matter(line, key):
                self._feed_shape(key, line)
                return
        if shape is not None:
            self._use(shape, line)
        recorder = self.recorder
        self.kept.add((self._number, line, recorder.newest, recorder.num_engine))

    def _feed_many(self, lines: Sequence[bytes], keys: Sequence[bytes]) -> int:
        """Take in lines with their keys while nothing is open; return how many were taken in.

        Lines of a shape that means nothing are only kept, in blocks: most of a log is such lines.
        """
        shapes, first, begun = self._shapes, self._number + 1, 0
        found = shapes.get_all(keys)
        for at in to_look_at(lines, found):
            # A shape that was not found may have become known since, or not been seen for long.
            line, shape = lines[at], found[at] or shapes.get(keys[at])
            if shape is not None:
                self._use(shape, line)
            elif not line or line.isspace():
                self._keep_block(lines, begun, at, first)
                begun = at + 1
            elif self._may_matter(line, keys[at]):
                self._number = first + at
                self._keep_block(lines, begun, at, first)
                begun, num_clears = at + 1, shapes.num_clears
                self._feed_shape(keys[at], line)
                if shapes.num_clears > num_clears:
                    self._window = _MIN_WINDOW
                    return begun
                if self._is_open:
                    return begun
        self._number = first + len(lines) - 1
        self._keep_block(lines, begun, len(lines), first)
        self._window = min(_MAX_WINDOW, 2 * self._window)
        return len(lines)

    def _keep_block(self, lines: Sequence[bytes], start: int, end: int, first: int) -> None:
        if end > start:
            recorder = self.recorder
            block = lines[start:end]
            self.kept.add_block(first + start, block, recorder.newest, recorder.num_engine)

    def _may_matter(self, line: bytes, key: bytes) -> bool:
        """Return whether a reader may use a line, and remember those that none uses."""
        if self._shapes.is_known_plain(key):
            return False
        if line.startswith(_RULE) or may_matter(line, has_digits=b"0" in key, speaks=_SPEAKS):
            return True
        self._shapes.add_plain(key)
        return False

    def _use(self, shape: Shape, line: bytes) -> None:
        """Take what a line of a known shape says; the line itself is kept by the caller."""
        if shape.fields:
            self.recorder.add_engine_line(shape.names, shape.fields, line)
        elif shape is not PLAIN:
            self.unknown.count += shape.is_unread
            if shape.is_event and len(self.events) < MAX_EVENTS:
                self._note_event(bare(visible(line)[-1])[0], self.recorder.newest)

    def _feed_shape(self, key: bytes, line: bytes) -> None:
        """Read a line, and remember what lines of its shape are if that is always the same."""
        num_uses, num_engine = self._num_uses, self.recorder.num_engine
        num_unread, num_events = self.unknown.count, len(self.events)
        self._feed_line(visible(last_drawing(line)))
        if self._num_uses != num_uses:
            return
        is_unread, is_event = self.unknown.count > num_unread, len(self.events) > num_events
        if self.recorder.num_engine == num_engine:
            shape = Shape(is_unread=is_unread, is_event=is_event)
            self._shapes.add(key, PLAIN if shape == PLAIN else shape)
            return
        if is_event:
            return
        fields = fields_in(line) if b"rank" not in line.lower() else ()
        if fields and self._engine == {n: float(line[i:j]) / by for n, i, j, by in fields}:
            names = frozenset(self._engine)
            names = self._engine_names.setdefault(names, names)
            self._shapes.add(key, Shape(fields=fields, names=names))

    def _begin_section(self) -> None:
        self._shapes.clear()
