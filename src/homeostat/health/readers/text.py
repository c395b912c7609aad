"""Console logs, line by line: metric rows of any format, and everything else as log lines.

A line is first freed of colours and of what Ray and launchers put before it; formats are tried in
turn on what is left. Memory is bounded: of the lines that are not metrics the first and the last
parts are kept, and every line is cut at a length that no message of use exceeds.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Any

from homeostat.health.log import Log, LogLine
from homeostat.health.readers import dict_rows, line_rows
from homeostat.health.readers.bars import BarRows, bar_in
from homeostat.health.readers.blocks import Blocks, Tables
from homeostat.health.readers.dumps import Dump, Dumps
from homeostat.health.readers.engine_lines import engine_row
from homeostat.health.readers.recorder import Recorder
from homeostat.health.readers.rows import Row
from homeostat.health.readers.settings import flat, settings_in, total_steps_in
from homeostat.health.readers.traces import MAX_EVENTS, Samples, event_in
from homeostat.health.reading import MAX_EXAMPLES, Reading, shortened
from homeostat.health.view import Event

MAX_FIRST_LINES = 30_000
MAX_LAST_LINES = 70_000
_MAX_LINE = 20_000
_MAX_SETTINGS = 20_000
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)?|[@-Z\\-_])")
_ACTOR = re.compile(r"^\s*+\((?P<actor>[^()]{0,80}?)\s?pid=\d++[^()]{0,80}+\)\s?")
_MAX_ACTORS = 4
_RANK = re.compile(r"^\[?(?:default|rank)\s?(?P<rank>\d{1,6})\]?\s?:\s?", re.IGNORECASE)
_REPEATED = re.compile(r"\[repeated \d++x across cluster\]")
_SPOKEN = re.compile(r"\b(?:step|rollout|iteration)[ _]?(\d{1,12})\b(?!/)", re.IGNORECASE)

# A number with decimals behind a name: two of them in a line look like metrics.
_NAMED_NUMBER = re.compile(
    r"(?<![\w/.-])[A-Za-z_][\w/.-]{0,60}+['\"]?[ ]?[:=][ ]?[-+]?[0-9]{1,15}\.[0-9]"
)


class LineKeeper:
    """The first and the last lines of a log, whatever its length."""

    def __init__(self) -> None:
        self._head: list[tuple[LogLine, int]] = []
        self._tail: deque[tuple[LogLine, int]] = deque(maxlen=MAX_LAST_LINES)

    def add(self, line: LogLine, num_engine: int) -> None:
        """`num_engine`: how many rows an engine had printed before it."""
        if len(self._head) < MAX_FIRST_LINES:
            self._head.append((line, num_engine))
        else:
            self._tail.append((line, num_engine))

    def log(self, *, by_engine: bool = False) -> Log:
        """`by_engine`: nothing was trained, so the engine's rows are what is counted."""
        both = (*self._head, *self._tail)
        if not by_engine:
            return Log([line for line, _ in both])
        return Log([LogLine(line.number, line.text, count or None) for line, count in both])


class TextReader:
    """Takes a log's lines in order. What it found is in its attributes."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()
        self.kept = LineKeeper()
        self.settings: dict[str, Any] = {}
        self.events: list[Event] = []
        self.samples = Samples()
        self._number = 0
        self._num_kept = 0
        self._bars = BarRows()
        self._blocks = Blocks()
        self._tables = Tables()
        self._in_traceback = False
        self._dumps = Dumps()
        self._ahead: dict[str, float] = {}
        self._num_unread = 0
        self._unread: list[str] = []

    def reading(self) -> Reading:
        """How much of the text was understood."""
        return Reading(
            num_lines=self._number,
            num_unread_rows=self._num_unread,
            unread_rows=tuple(self._unread),
        )

    def feed(self, lines: Iterable[str]) -> None:
        for raw in lines:
            self._number += 1
            self._feed_line(raw.rstrip("\r\n"))

    def skip(self, count: int) -> None:
        """Lines that were taken otherwise: those that follow keep their numbers."""
        self._number += count

    def finish(self) -> None:
        if self._dumps.is_open:
            self._take_dump(self._dumps.close(), "", 0)
        self.samples.end_of_text()

    def _feed_line(self, raw: str) -> None:
        text = _ANSI.sub("", raw) if "\x1b" in raw else raw
        # A bar is redrawn behind a carriage return; the last drawing is what a reader sees.
        pieces = text.split("\r") if "\r" in text else [text]
        for piece in pieces[:-1][-2_000:]:
            if piece.strip():
                self._rows_of(*_bare(piece))
        body, source, rank = _bare(pieces[-1])
        if self._dumps.holds(body, source) or not self._rows_of(body, source, rank):
            self._keep(_shortened(pieces[-1]), body, source, rank)

    def _rows_of(self, body: str, source: str, rank: int) -> bool:
        """Take the line's metrics. True where the line holds nothing else."""
        if not body or body.isspace():
            return False
        self._ahead.update(line_rows.ahead_of_row(body))
        row, is_consumed = self._row(body, source)
        if row is None:
            return is_consumed
        if self._ahead and row.form == "prime":
            row.values.update(self._ahead)
            self._ahead = {}
        # All ranks print the same row; the first one's counts.
        if rank == 0 and row.values:
            self.recorder.add(row)
        self.samples.end_of_text()
        return is_consumed

    def _row(self, body: str, source: str) -> tuple[Row | None, bool]:
        if "%|" in body:
            bar = bar_in(body)
            if bar is not None:
                return self._bar_row(bar, body[bar.end :], source)
        if "step:" in body and " - " in body:
            row = line_rows.verl_row(body)
            if row is not None:
                return row, True
        if "{" in body:
            found = dict_rows.mapping_in(body)
            if found is not None:
                before, mapping, _ = found
                row = dict_rows.row_of(mapping, before=before, source=source)
                if row is None:
                    self._note_settings(flat(mapping))
                    self._note_unread(body)
                    return None, False
                return row, True
        row = engine_row(body)
        if row is not None:
            return row, False
        header = self._blocks.header(body)
        if header is not None:
            self.recorder.begin_step(*header)
            return None, True
        row = self._blocks.row(body) or self._tables.row(body) or line_rows.read_line(body)
        if row is None:
            self._note_unread(body)
        return row, row is not None

    def _note_unread(self, body: str) -> None:
        """Count a line that looks like metrics, but is of no format that is known."""
        if body.count(".") < 2 or len(_NAMED_NUMBER.findall(body[:_MAX_LINE])) < 2:
            return
        self._num_unread += 1
        if len(self._unread) < MAX_EXAMPLES:
            self._unread.append(shortened(body))

    def _bar_row(self, bar: Any, rest: str, source: str) -> tuple[Row | None, bool]:
        """A bar's own metrics, or the row that follows it on the same line."""
        if bar.is_training and not bar.values:
            self.recorder.bar(bar.count, bar.total)
        if "{" in rest:
            row, is_consumed = self._row(rest, source)
            if row is not None:
                return row, is_consumed
        if bar.values:
            return self._bars.row(bar), True
        self._bars.other(bar)
        return None, not bar.title

    def _keep(self, text: str, body: str, source: str, rank: int) -> None:
        if not text.strip():
            return
        if len(body) < 400 and any(word in body for word in ("tep", "ollout", "teration")):
            spoken = _SPOKEN.search(body)
            if spoken:
                self.recorder.mention(int(spoken[1]))
        step = self.recorder.newest
        self.kept.add(LogLine(self._number, text, step), self.recorder.num_engine)
        self._follow_traceback(body)
        if not self._in_traceback and self._num_kept < _MAX_SETTINGS:
            self._settings_of(body, source, rank)
        self._num_kept += 1
        self.samples.feed(body, step)
        event = event_in(body, step)
        if event is not None and len(self.events) < MAX_EVENTS:
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
        """A literal over several lines: metrics, else settings."""
        if dump.mapping is None:
            for line in dump.lines:
                self._note_settings(dict(settings_in(line)))
            return
        row = None
        if len(dump.lines) > 1:
            row = dict_rows.row_of(dump.mapping, before=dump.before, source=source)
        # Sections within sections are a config's, unless a step is named with them.
        is_nested = any(isinstance(value, dict) for value in dump.mapping.values())
        if row is None or (is_nested and row.step is None):
            self._note_settings(flat(dump.mapping))
        elif rank == 0 and row.values:
            self.recorder.add(row)

    def _note_settings(self, found: dict[str, Any]) -> bool:
        if len(self.recorder.settings) > _MAX_SETTINGS:
            return False
        self.settings.update(found)
        self.recorder.settings.extend(found.items())
        return bool(found)


def _bare(piece: str) -> tuple[str, str, int]:
    """A line without what Ray and launchers put around it; the actor's name; the rank."""
    source, rank = "", 0
    body = piece
    for _ in range(_MAX_ACTORS):
        found = _ACTOR.match(body) if body[:1] in {"(", " "} else None
        if not found:
            break
        source, body = found["actor"] or source, body[found.end() :]
    found = _RANK.match(body)
    if found:
        rank, body = int(found["rank"]), body[found.end() :]
    if "[repeated " in body:
        found = _REPEATED.search(body)
        body = body[: found.start()].rstrip() if found else body
    return body, source, rank


def _shortened(text: str) -> str:
    if len(text) <= _MAX_LINE:
        return text
    return f"{text[: _MAX_LINE - 4_000]} ... {text[-4_000:]}"
