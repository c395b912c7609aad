"""A library's own warning in the log names an illness that no rule found.

## What it sees
Lines of the log with which a trainer, an engine or another library says that something is not as it
should be: an optimizer state that was not found, a cache that cannot hold a sequence, rows that
were dropped. The messages are known from the sources of these libraries. A line counts wherever it
stands; only the first and the last 1,000 lines are read.

## Why it matters
Libraries report much once, at the start, where nobody reads it. What they report often explains
what the metrics show later.

## Likely causes
- resumed-without-optimizer-state, rows-dropped, attention-fallback, eval-missing,
  tool-call-parse-failed and others: what the message states, with the line in which it stands.

## What to do
Read the lines in question. Each of them says what the library did in place of what was asked.

## Known false alarms
A fallback that you know of and accept. This is why the finding is only information.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from homeostat.health.failures.library_messages import LibraryMessage, known_message
from homeostat.health.failures.lone_errors import as_error
from homeostat.health.finding import Cause, Confidence, Family, Level, Sighting
from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.log import LogLine
from homeostat.health.rule import Rule
from homeostat.health.view import RunView
from homeostat.health.words import shortened

_MAX_LINES = 1_000
_MAX_CAUSES = 4


def check(view: RunView, _: object) -> Iterator[Sighting]:
    if view.framework is HOMEOSTAT or not view.metrics:
        return
    found = dict(islice(_first_lines(view), _MAX_CAUSES))
    if not found:
        return
    steps = [line.step for line, _ in found.values() if line.step is not None]
    yield Sighting(
        message=f"The log has {len(found)} {'message' if len(found) == 1 else 'messages'} of "
        f"libraries that may explain what goes wrong: {', '.join(found)}.",
        evidence=tuple(
            f"line {line.number}: {shortened(line.text.strip(), 200)}" for line, _ in found.values()
        ),
        causes=tuple(
            Cause(name, f"a message of {message.raised_by} in line {line.number} says so")
            for name, (line, message) in found.items()
        ),
        first_step=min(steps, default=None),
    )


def _first_lines(view: RunView) -> Iterator[tuple[str, tuple[LogLine, LibraryMessage]]]:
    """Yield each illness that a library's message states, with the first line that has it."""
    lines, seen = view.log.lines, set[str]()
    for line in (*lines[:_MAX_LINES], *lines[max(_MAX_LINES, len(lines) - _MAX_LINES) :]):
        message = known_message(as_error(line).message)
        if message is not None and message.names[0] not in seen:
            seen.add(message.names[0])
            yield message.names[0], (line, message)


RULE = Rule(
    code="VIT008",
    name="library-warns",
    family=Family.CONFIG,
    level=Level.INFO,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("log",),
)
