"""A trouble that is recognised by its words.

The same words may have several causes: "CUDA out of memory" in the log-prob function is not the
one in the engine's wake-up. So a trouble is words *and* context; the one with more context names
the plainer one in `explains`, and wins where both match.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.log import LogLine
from homeostat.health.rule import Rule
from homeostat.health.view import RunView

# Characters of a line that are quoted.
MAX_QUOTE = 300
# Lines of a text whose surroundings are looked at.
MAX_TRIED = 300
# Where a logger puts its level: INFO, [W301, UserWarning.
_HEAD = 120
_RETRIES = ("thrown while requesting", "Retrying in ")
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "was the direct cause of the following")
# A line of that length with so many pairs of names and values is a list of settings.
_DUMP_LENGTH, _DUMP_PAIRS = 300, 10
_RAISED = re.compile(r"Error\b|Exception\b")
_MILD = re.compile(
    r"\b(?:INFO|DEBUG|WARNING|WARN|[A-Z][A-Za-z]{0,30}Warning)\b|(?:^|\[)[WI]\d{3,4} "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Patterns are those of log.py.

    texts       its own words: any of them
    context     further words, one of which must stand at most `within` lines away (0: anywhere)
    notes       its words are ordinary notes of a logger, and `when` decides what they mean: they
                count as much as an error's
    survivable  it is tried again or done without: no more than a warning where the log goes on to
                a traceback of something else
    unless      words anywhere in the log that speak against it
    when        asked last, where settings or metrics decide: a pure function of the view
    what        one sentence for the user: what happened
    why         why it happens: two or three sentences
    causes      in order; the first is usually `name` itself
    """

    code: str
    name: str
    family: Family
    texts: tuple[str, ...]
    what: str
    why: str
    fixes: tuple[Fix, ...]
    causes: tuple[Cause, ...] = ()
    context: tuple[str, ...] = ()
    within: int = 80
    unless: tuple[str, ...] = ()
    when: Callable[[RunView], bool] | None = None
    notes: bool = False
    survivable: bool = False
    level: Level = Level.ERROR
    confidence: Confidence = Confidence.MEASURED
    explains: tuple[str, ...] = ()


def rule_of(trouble: Trouble) -> Rule:
    """The rule that sees a trouble."""

    def check(view: RunView, _: object) -> Iterator[Sighting]:
        found = _match(trouble, view)
        if found is None:
            return
        line, beside = found
        is_mild = not trouble.notes and is_said_mildly(line)
        is_mild = is_mild or (trouble.survivable and _is_outlived(trouble, view))
        quotes = [line] + ([beside] if beside is not None and beside != line else [])
        yield Sighting(
            message=trouble.what,
            evidence=tuple(f"line {q.number}: {q.text.strip()[:MAX_QUOTE]}" for q in quotes),
            causes=trouble.causes or (Cause(trouble.name, trouble.why),),
            fixes=trouble.fixes,
            first_step=_step_of(line, view),
            last_step=line.step,
            level=Level.WARN if is_mild and trouble.level is Level.ERROR else None,
        )

    return Rule(
        code=trouble.code,
        name=trouble.name,
        family=trouble.family,
        level=trouble.level,
        confidence=trouble.confidence,
        check=check,
        needs=("log",),
        explains=trouble.explains,
        doc=_page(trouble),
    )


def _step_of(line: LogLine, view: RunView) -> int | None:
    """The newest step before the line; the run's first one where the line stands before it."""
    if line.step is not None:
        return line.step
    firsts = [int(series.steps[0]) for series in view.metrics.values() if len(series)]
    return min(firsts, default=None)


def _is_outlived(trouble: Trouble, view: RunView) -> bool:
    """Whether a traceback that does not hold the trouble's words follows them."""
    newest, traceback = view.log.last(*trouble.texts), view.log.last(_TRACEBACK)
    if newest is None or traceback is None or newest.number > traceback.number:
        return False
    # A traceback that names the one before it as its cause belongs to that.
    return view.log.near(traceback, *_CHAINED, lines=3) is None


def is_said_mildly(line: LogLine) -> bool:
    """Whether whoever wrote the line calls it a note or a warning, or tries again."""
    is_retry = any(words in line.text for words in _RETRIES)
    return is_retry or _MILD.search(line.text[:_HEAD]) is not None


def lists_settings(line: LogLine) -> bool:
    """Whether a line only lists settings: words that stand in it did not happen."""
    text = line.text
    if len(text) < _DUMP_LENGTH or text.count("=") + text.count(": ") < _DUMP_PAIRS:
        return False
    return _RAISED.search(text) is None


def _match(trouble: Trouble, view: RunView) -> tuple[LogLine, LogLine | None] | None:
    """The line with the trouble's words, and the one with its context.

    A line that is an error by its own words goes before one that is only a warning.
    """
    if trouble.unless and view.log.has(*trouble.unless):
        return None
    if trouble.when is not None and not trouble.when(view):
        return None
    anywhere = view.log.first(*trouble.context) if trouble.context and not trouble.within else None
    mild: tuple[LogLine, LogLine | None] | None = None
    for pattern in trouble.texts:
        for line in islice(view.log.find(pattern), MAX_TRIED):
            if lists_settings(line) and not trouble.notes:
                continue
            beside = anywhere
            if trouble.context and beside is None:
                beside = view.log.near(line, *trouble.context, lines=trouble.within)
                if beside is None:
                    continue
            if not is_said_mildly(line):
                return line, beside
            mild = mild or (line, beside)
    return mild


def _page(trouble: Trouble) -> str:
    texts = "\n".join(f"- `{text}`" for text in trouble.texts)
    fixes = "\n".join(f"- {fix.why}" for fix in trouble.fixes)
    causes = "\n".join(f"- {cause.name}: {cause.why}" for cause in trouble.causes)
    near = ", ".join(f"`{text}`" for text in trouble.context)
    context = f"\n\nTogether with one of: {near}." if near else ""
    return (
        f"{trouble.what}\n\n## What it sees\nOne of these texts (`*` stands for anything):\n"
        f"{texts}{context}\n\n## Why it matters\n{trouble.why}\n\n"
        f"## Likely causes\n{causes or f'- {trouble.name}'}\n\n## What to do\n{fixes}\n\n"
        "## Known false alarms\nA log that quotes the text without having met it.\n"
    )
