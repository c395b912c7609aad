"""Tell lines of a log that hold a signature's words although nothing of the kind ended the run.

    list of settings     a dump of the config names settings; none of it happened
    template             a chat template that is printed holds the errors that it may raise
    code beside          notebooks and rich print the code around the line that raised, with
                         numbers; another branch's `raise ValueError("...")` is among it
    ignored exception    Python reports what a destructor raised while the process ended, and does
                         not stop: it follows from what ended the run
    advice               "If you get `CUDA error: ...`, do this": it has not happened
    denied               "no `CUDA out of memory` in the worker's log", which a person writes
    caught exception     "Exception = ...", several times: a script prints what it catches, such as
                         what code of the model raises, and tries the next one
    rest of a warning    a warning of Python that quotes an exception below its own line: somebody
                         caught that exception, and the run continued

Signatures pass over such lines, over those of a warning if they say that the run ended.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

from homeostat.health.failures.speakers import speaker_in
from homeostat.health.failures.tracebacks import IGNORED
from homeostat.health.log import Log, LogLine

# A line of that length with so many pairs of names and values is a list of settings.
_DUMP_LENGTH, _DUMP_PAIRS = 300, 10
_RAISED = re.compile(r"Error\b|Exception\b")
_CAUGHT = "Exception = "
# Marks of a Jinja template, of which a chat template has many in one line.
_TEMPLATE = re.compile(r"\{%-? ?(?:if|elif|else|for|set|endif|endfor)\b")
# The number of a quoted line of code, and what code begins with. The line that raised has an arrow
# before its number.
_NUMBER = r"(?:\[rank\d{1,5}\]:? ?)?[ \t\u2502|]{0,12}\d{1,6}[ \t\u2502|]{1,200}"
_TEXT_BESIDE = re.compile(_NUMBER + r"[rbfu]{0,2}[\"']")
_CODE_BESIDE = re.compile(
    _NUMBER + r"(?:#|raise |assert |el(?:if |se)|if |return |except|with |for |while |def |print\("
    r"|log\w{0,8}\.|_log\w{0,8}\.|warn\w{0,8}[.(]|self\.|\w{1,60} = )"
)
_ARROW = re.compile(r"(?:\[rank\d{1,5}\]:? ?)?[ \t\u2502|]{0,12}(?:-{1,8}>|\u2771) ?\d{1,6} ")
# Lines of a message that is written over several lines of code, and lines of a traceback.
_MAX_TEXT_LINES, _MAX_TRACEBACK = 12, 60
_HEADER = "traceback (most recent call"
# What denies the words that follow it at once.
_DENIES = re.compile(r"\b(?:no|without(?: an?)?|not an?|nor|neither) [`'\"*(]{0,3}$", re.IGNORECASE)
# The head of a warning that Python prints, whose text continues in the next line.
_WARNS = re.compile(r"\.py:\d{1,6}[^\s:]{0,2}\S{0,400}: \w{0,60}Warning: [^\n]{0,400}:\s*$")
_MAX_WARNING = 6


def lists_settings(line: LogLine) -> bool:
    """Return whether a line only lists settings: what its words say did not happen."""
    text = line.text
    if len(text) < _DUMP_LENGTH or text.count("=") + text.count(": ") < _DUMP_PAIRS:
        return False
    return _RAISED.search(text) is None


def is_template(line: LogLine) -> bool:
    """Return whether a line is part of a chat template."""
    return _TEMPLATE.search(line.text) is not None


def is_denied(line: LogLine, pattern: str) -> bool:
    """Return whether a line says that what a pattern matches there did not happen."""
    start = re.split(r" && |\*", pattern)[0].lower()
    at = line.text.lower().find(start)
    return at > 0 and _DENIES.search(line.text[max(0, at - 20) : at]) is not None


def is_caught(line: LogLine, log: Log) -> bool:
    """Return whether a script printed an exception that it caught, as it did others."""
    caught = line.text.lstrip().startswith(_CAUGHT)
    return caught and len(list(islice(log.find(_CAUGHT), 2))) > 1


def is_code_beside(line: LogLine, log: Log) -> bool:
    """Return whether a line quotes code around the line that raised: nothing of it happened."""
    if _TEXT_BESIDE.match(line.text) is None:
        return _CODE_BESIDE.match(line.text) is not None
    # The texts below the head of a raise belong to it.
    heads = (
        one
        for one in reversed(_above(line, log, _MAX_TEXT_LINES))
        if _TEXT_BESIDE.match(one.text) is None
    )
    head = next(heads, None)
    return head is None or _ARROW.match(head.text) is None


def is_ignored(line: LogLine, log: Log) -> bool:
    """Return whether a line belongs to an exception that Python ignored, that of a destructor."""
    if not log.has(IGNORED):
        return False
    speaker = speaker_in(line.text)[0]
    said = [speaker_in(one.text) for one in _above(line, log, _MAX_TRACEBACK)]
    texts = [text for who, text in said if who == speaker and text.strip()]
    for place in range(len(texts) - 1, -1, -1):
        if _HEADER in texts[place].lower():
            return any(IGNORED in text.lower() for text in texts[max(0, place - 2) : place])
        if not texts[place][:1].isspace():
            return IGNORED in texts[place].lower()
    return False


def continues_warning(line: LogLine, log: Log) -> bool:
    """Return whether a line is the rest of a warning that Python printed: nothing ended there."""
    speaker = speaker_in(line.text)[0]
    for one in reversed(_above(line, log, _MAX_WARNING)):
        who, text = speaker_in(one.text)
        if who != speaker:
            continue
        if _WARNS.search(text):
            return True
        # The line of code that warned follows the text, and is indented.
        if text[:1].isspace() or not text:
            return False
    return False


def _above(line: LogLine, log: Log, number: int) -> Sequence[LogLine]:
    """Return the lines above a line, at most so many."""
    place = bisect_left(log.lines, line.number, key=lambda one: one.number)
    return log.lines[max(0, place - number) : place]
