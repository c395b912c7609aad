"""Read console logs line by line: rows of metrics in any format; all other lines are log.

Colours and the prefixes of Ray and launchers are removed from a line. Then the formats are tried in
turn. Memory is bounded: of the lines that are not metrics, the first and the last ones are kept,
and longer lines than any useful message are cut.

For long logs, which repeat themselves, LongLogReader (long_logs.py) gives the same result faster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from homeostat.health.readers.lines import dict_rows, line_rows
from homeostat.health.readers.lines.bars import BarRows, bar_in
from homeostat.health.readers.lines.blocks import Blocks, Tables
from homeostat.health.readers.lines.dumps import Dump, Dumps
from homeostat.health.readers.lines.engine_lines import engine_row
from homeostat.health.readers.lines.kept_lines import (
    LineKeeper,
    pieces_of,
    shortened_line,
)
from homeostat.health.readers.lines.library_rows import SUMMARY_FORM, LibraryRows
from homeostat.health.readers.lines.line_parts import apart, bare, is_one_bar, is_redrawn
from homeostat.health.readers.lines.own_lines import own_row
from homeostat.health.readers.lines.own_messages import OwnMessages
from homeostat.health.readers.lines.ruled_tables import RuledTables
from homeostat.health.readers.lines.script_rows import ScriptRows
from homeostat.health.readers.lines.traces import MAX_EVENTS, Samples, event_in
from homeostat.health.readers.lines.unknown_rows import UnknownRows
from homeostat.health.readers.rows.recorder import Recorder
from homeostat.health.readers.rows.row import Row, RowKind
from homeostat.health.readers.values.literals import is_json_object
from homeostat.health.readers.values.numbers import without_tensors
from homeostat.health.readers.values.settings import flat, settings_in, total_steps_in
from homeostat.health.reading import Reading
from homeostat.health.view import Event

# Number of characters of a line that are read: the beginning, and the end (_TEXT_TAIL of them).
MAX_TEXT = 40_000
_TEXT_TAIL = 8_000
MAX_SETTINGS = 20_000
_MANY_ROWS = 200
# Characters of a line whose shape is remembered, and number of shapes.
_MAX_SHAPE, _MAX_SHAPES = 400, 2_000
_DIGITS = re.compile(r"\d+")
_SPOKEN = re.compile(r"\b(?:step|rollout|iteration)[ _]?(\d{1,12})\b(?!/)", re.IGNORECASE)


class TextReader:
    """Read a log's lines in order. The results are in its attributes."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()
        self.kept = LineKeeper()
        self.settings: dict[str, Any] = {}
        self.events: list[Event] = []
        self.samples = Samples()
        self.unknown = UnknownRows()
        self.scripts = ScriptRows()
        self._number = 0
        self._num_kept = 0
        self._bars = BarRows()
        # Line number, count and total of the newest bar.
        self._bar_at = (0, 0, 0)
        self._blocks = Blocks()
        self._tables = Tables()
        self._ruled = RuledTables()
        self._verl = line_rows.VerlRows()
        self._library = LibraryRows()
        self._in_traceback = False
        # Shapes of lines that are no row of pairs.
        self._without_row: set[str] = set()
        self._own_messages = OwnMessages()
        self._dumps = Dumps()
        self._ahead: dict[str, float] = {}
        # Increases with every use of a line, except for engines' rows and unknown rows.
        self._num_uses = 0
        self._engine: dict[str, float] = {}
        self._num_cut = 0

    def reading(self) -> Reading:
        """Return how much of the text was understood."""
        return Reading(
            num_lines=self._number,
            num_unread_rows=self.unknown.count,
            unread_rows=tuple(self.unknown.examples),
            notes=(_cut_note(self._num_cut),) if self._num_cut else (),
        )

    def open_bar(self) -> tuple[int, int] | None:
        """Return count and total of the bar with which the text ends; None if it ends otherwise."""
        line, count, total = self._bar_at
        return (count, total) if count < total and line >= self._number - 2 else None

    def feed(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._number += 1
            self._feed_line(pieces_of(line))

    @property
    def _has_many_rows(self) -> bool:
        """Return whether a known format has so many rows that no rows of scripts are collected."""
        return self.recorder.num_rows > _MANY_ROWS

    @property
    def _is_open(self) -> bool:
        return (
            self._dumps.is_open
            or self.samples.is_open
            or self._ruled.is_open
            or self._own_messages.is_open
        )

    def skip_settings(self) -> None:
        """Do not search the following lines for settings, as after the start of a long log."""
        self._num_kept = max(self._num_kept, MAX_SETTINGS)

    def skip(self, count: int) -> None:
        """Count lines that another reader has read, so that the following lines have the right
        number.
        """
        self._number += count

    def finish(self) -> None:
        if self._dumps.is_open:
            self._take_dump(self._dumps.close(), "", 0)
        self.samples.end_of_text()

    def _feed_line(self, pieces: list[str]) -> None:
        """Read a line that is split at carriage returns; its last piece is what a person sees."""
        if len(pieces) > 1 and is_one_bar(pieces):
            pieces = pieces[-1:]
        for piece, following in pairwise(pieces):
            if not is_redrawn(piece, following) and piece.strip():
                self._rows_of(*bare(self._cut(piece)))
        # A bar that an error cut off says what was being done: it is kept like one on its own line.
        for part in apart(pieces[-1]):
            self._feed_part(self._cut(part))

    def _feed_part(self, part: str) -> None:
        """Read a line without what was overwritten on it."""
        body, source, rank = bare(part)
        if self._own_messages.holds(body):
            # The next line of such a shape may stand alone.
            self._num_uses += 1
            return
        if self._dumps.holds(body, source) or not self._rows_of(body, source, rank):
            self._keep(shortened_line(part), body, source, rank)

    def _cut(self, piece: str) -> str:
        """Shorten a text, because readers take long for long texts.

        A JSON object stays whole, because it is parsed quickly.
        """
        if len(piece) <= MAX_TEXT or is_json_object(piece, piece.find("{")):
            return piece
        self._num_cut += 1
        return f"{piece[: MAX_TEXT - _TEXT_TAIL]} ... {piece[-_TEXT_TAIL:]}"

    def _rows_of(self, body: str, source: str, rank: int) -> bool:
        """Record the metrics of a line. Return True if the line contains nothing else."""
        if not body or body.isspace():
            return False
        if "tensor(" in body:
            body = without_tensors(body)
        row, is_table = self._ruled.feed(body)
        if row is not None and rank == 0:
            self.recorder.add(row)
        self._num_uses += self._ruled.is_open
        if is_table:
            return True
        if "zero_advantage=" in body:
            self._ahead.update(line_rows.ahead_of_row(body))
            self._num_uses += 1
        row, is_consumed = self._library_row(body)
        if not is_consumed:
            row, is_consumed = self._row(body, source)
            if rank == 0 and not self._has_many_rows:
                self._num_uses += self.scripts.take(body)
        if row is None:
            self._num_uses += is_consumed
            return is_consumed
        if row.kind is RowKind.ENGINE and rank == 0:
            self._engine = row.values
        else:
            self._num_uses += 1
        if self._ahead and row.form == "prime":
            row.values.update(self._ahead)
            self._ahead = {}
        # All ranks print the same row; use that of the first rank.
        if rank == 0 and row.values:
            self.recorder.add(row)
        self.samples.end_of_text()
        return is_consumed

    def _library_row(self, body: str) -> tuple[Row | None, bool]:
        """Return the row of a line of a library, and whether the line has nothing else."""
        self._num_uses += self._library.note(body)
        # The summary of a run is of use only if the log has none of its rows.
        if self.recorder.forms.keys() <= {SUMMARY_FORM}:
            row = self._library.summary(body)
            if row is not None:
                return row, True
        return self._library.row(body)

    def _row(self, body: str, source: str) -> tuple[Row | None, bool]:
        if "%|" in body:
            bar = bar_in(body)
            if bar is not None:
                self._num_uses += 1
                return self._bar_row(bar, body[bar.end :], source)
        if "step " in body:
            row = own_row(body)
            if row is not None:
                return row, True
        if "step:" in body and " - " in body:
            row = self._verl.row(body)
            if row is not None:
                return row, True
        if "{" in body:
            found = dict_rows.mapping_in(body)
            if found is not None:
                before, mapping, _ = found
                row = dict_rows.row_of(mapping, before=before, source=source)
                if row is None:
                    self._note_settings(flat(mapping))
                    self.unknown.note(body)
                    if not self.recorder.num_rows:
                        self._num_uses += self.unknown.take_mapping(
                            mapping, before=before, source=source
                        )
                    return None, False
                return row, True
        row = engine_row(body)
        if row is not None:
            return row, False
        header = self._blocks.header(body)
        if header is not None:
            self._begin_section()
            self.recorder.begin_step(*header)
            return None, True
        row = self._blocks.row(body) or self._tables.row(body) or self._line_row(body)
        if row is None:
            if self.unknown.note(body) and not self.recorder.num_rows:
                self._num_uses += self.unknown.take_line(body)
            # Below a header, the meaning of a line depends on the header and not only on its shape.
            self._num_uses += self._blocks.may_be_row(body) or self._tables.may_be_row(body)
        elif row.form == "table":
            self._begin_section()
        return row, row is not None

    def _line_row(self, body: str) -> Row | None:
        """Return the row of a line of pairs. Lines that differ only in digits are alike in that."""
        shape = _DIGITS.sub("0", body) if len(body) <= _MAX_SHAPE else ""
        if shape in self._without_row:
            return None
        row = line_rows.read_line(body)
        if row is None and shape and len(self._without_row) < _MAX_SHAPES:
            self._without_row.add(shape)
        return row

    def _begin_section(self) -> None:
        """Hook for subclasses, called at a header: the lines below it may have another meaning."""

    def _bar_row(self, bar: Any, rest: str, source: str) -> tuple[Row | None, bool]:
        """Return a bar's own metrics, or the row that follows the bar on the same line."""
        self._bar_at = (self._number, bar.count, bar.total)
        if bar.is_training and not bar.values:
            self.recorder.bar(bar.count, bar.total)
        if "{" in rest:
            row, is_consumed = self._row(rest, source)
            if row is not None:
                return row, is_consumed
        if bar.values and not bar.is_of_engine:
            return self._bars.row(bar), True
        self._bars.other(bar)
        return None, not bar.title

    def _keep(self, text: str, body: str, source: str, rank: int) -> None:
        if not text.strip():
            return
        if len(body) < 400 and ("tep" in body or "ollout" in body or "teration" in body):
            spoken = _SPOKEN.search(body)
            if spoken:
                self._num_uses += 1
                self.recorder.mention(int(spoken[1]))
        step = self.recorder.newest
        self.kept.add((self._number, text, step, self.recorder.num_engine))
        if self._num_kept < MAX_SETTINGS:
            self._follow_traceback(body)
            if not self._in_traceback:
                self._settings_of(body, source, rank)
        elif self._dumps.is_open:
            self._take_dump(self._dumps.close(), source, rank)
        self._num_kept += 1
        self._num_uses += self.samples.feed(body, step)
        self._note_event(body, step)

    def _note_event(self, body: str, step: int | None) -> None:
        event = event_in(body, step) if len(self.events) < MAX_EVENTS else None
        if event is not None:
            self.events.append(event)

    def _follow_traceback(self, body: str) -> None:
        if "Traceback (most recent call last)" in body:
            self._in_traceback = True
        elif self._in_traceback and body[:1] not in {" ", "\t", ""} and "  File " not in body:
            self._in_traceback = False

    def _settings_of(self, body: str, source: str, rank: int) -> None:
        total = total_steps_in(body)
        if total:
            self.recorder.total_steps = total
        if self._dumps.is_open or self._dumps.opens(body):
            closed = self._dumps.add(body, source)
            if closed is not None:
                self._take_dump(closed, source, rank)
            return
        self._dumps.heading(body, source)
        if self._note_settings(dict(settings_in(body))):
            self.recorder.label = body.strip()[:200]

    def _take_dump(self, dump: Dump, source: str, rank: int) -> None:
        """Record a literal over several lines: as metrics, or else as settings."""
        if dump.mapping is None:
            for line in dump.lines:
                self._note_settings(dict(settings_in(line)))
            return
        row = None
        if len(dump.lines) > 1:
            row = dict_rows.row_of(dump.mapping, before=dump.before, source=source)
        # A literal with nested sections is a config, unless it has a step.
        is_nested = any(isinstance(value, dict) for value in dump.mapping.values())
        if row is None or (is_nested and row.step is None):
            self._note_settings(flat(dump.mapping))
        elif rank == 0 and row.values:
            self.recorder.add(row)

    def _note_settings(self, found: dict[str, Any]) -> bool:
        if len(self.recorder.settings) > MAX_SETTINGS:
            return False
        self._num_uses += bool(found)
        self.settings.update(found)
        self.recorder.settings.extend(found.items())
        return bool(found)


def _cut_note(count: int) -> str:
    have = "1 line has" if count == 1 else f"{count:,} lines have"
    return (
        f"{have} more than {MAX_TEXT:,} characters; of each the first "
        f"{MAX_TEXT - _TEXT_TAIL:,} and the last {_TEXT_TAIL:,} were read."
    )
