"""Read long console logs as bytes, and parse only lines of a shape that is not known yet.

    lines -> shapes -> plain: only kept, in blocks | an engine's numbers | everything else: text.py

The result is the same as that of TextReader for the same lines; shapes.py explains why.
"""

from __future__ import annotations

from collections.abc import Sequence

from homeostat.health.readers.files.shapes import (
    PLAIN,
    Shape,
    Shapes,
    is_sentence,
    may_matter,
    to_look_at,
)
from homeostat.health.readers.files.text import MAX_SETTINGS, TextReader
from homeostat.health.readers.lines import line_rows
from homeostat.health.readers.lines.engine_lines import fields_in
from homeostat.health.readers.lines.kept_lines import visible
from homeostat.health.readers.lines.line_parts import bare, last_drawing
from homeostat.health.readers.lines.traces import MAX_EVENTS
from homeostat.health.readers.rows.recorder import Recorder

_SPEAKS = tuple(word.encode() for word in line_rows.SPEAKS)
# A line that starts like this may begin a table, whose lines have a meaning only within it.
_RULE = b"-" * 12
# Number of lines whose shapes are looked up together. It is small while headers often clear them.
_MIN_WINDOW, _MAX_WINDOW = 64, 2_048


class LongLogReader(TextReader):
    """Read a log's lines in order, as bytes. The results are in its attributes."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        super().__init__(recorder)
        self._shapes = Shapes()
        self._window = _MAX_WINDOW
        # One object for each set of names that engines print, so that its hash is computed once.
        self._engine_names: dict[frozenset[str], frozenset[str]] = {}

    def feed_bytes(self, lines: Sequence[bytes]) -> None:
        """Read lines as a file has them. Lines of a known shape are not parsed."""
        start, keys = 0, None
        while start < len(lines):
            is_open = self._num_kept < MAX_SETTINGS or self._is_open
            if is_open or self.recorder.newest is None:
                # Settings are still searched, a literal or table is open, or no step was printed
                # yet.
                self._number += 1
                self._feed_one(lines[start], is_open=is_open)
                start += 1
            else:
                if keys is None:
                    keys = self._shapes.keys(lines)
                end = start + self._window
                start += self._feed_many(lines[start:end], keys[start:end])

    def _feed_one(self, line: bytes, *, is_open: bool) -> None:
        """Read one line, whatever was printed before it."""
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
        """Read lines, given their keys, until a literal or table opens; return the number of lines
        read.

        Most lines of a log have a shape without any meaning. These are only kept, in blocks.
        """
        shapes, first, begun = self._shapes, self._number + 1, 0
        found = shapes.get_all(keys)
        for at in to_look_at(lines, found):
            # The shape may have become known since it was looked up, or be one of those not seen
            # recently.
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
        """Return whether a reader may use a line. Remember the lines that no reader uses."""
        if self._shapes.is_known_plain(key):
            return False
        if line.startswith(_RULE) or may_matter(line, has_digits=b"0" in key, speaks=_SPEAKS):
            return True
        self._shapes.add_plain(key)
        return False

    def _use(self, shape: Shape, line: bytes) -> None:
        """Use the information in a line of a known shape. The caller keeps the line itself."""
        if shape.fields:
            self.recorder.add_engine_line(shape.names, shape.fields, line)
        elif shape is not PLAIN:
            self.unknown.count += shape.is_unread
            if shape.is_event and len(self.events) < MAX_EVENTS:
                self._note_event(bare(visible(line)[-1])[0], self.recorder.newest)

    def _feed_shape(self, key: bytes, line: bytes) -> None:
        """Read a line, and remember the meaning of its shape if all lines of that shape have it."""
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
