"""Read the time of log lines, to see that a log continues while the run does not."""

from __future__ import annotations

import re
from itertools import pairwise

from homeostat.health.log import Log

_TIME = re.compile(r"(?<!\d)(?P<h>[0-2]\d):(?P<m>[0-5]\d):(?P<s>[0-5]\d)(?![\d:])")
_MAX_HEAD = 120
_MAX_LINES = 4_000
_DAY_S = 86_400
# Steps whose time must be known before a longer one is distinguished from the others.
_MIN_STEPS = 4
# A step that takes this many times as long as any before it, and at least so many seconds, hangs.
_TIMES = 10.0
_MIN_STALL_S = 1_800.0


def seconds_in(text: str) -> int | None:
    """Return the time of day that a line begins with, in seconds; None if it names none."""
    found = _TIME.search(text[:_MAX_HEAD])
    if found is None:
        return None
    return int(found["h"]) * 3_600 + int(found["m"]) * 60 + int(found["s"])


def stalled_s(log: Log) -> float | None:
    """Return for how many seconds the log continued after its last step, if that is a hang.

    The lines of a step begin when its number is first seen. None if the times are not known, or
    the newest step is not far longer than the others.
    """
    begins: list[tuple[int, float]] = []
    previous, day, now = None, 0, None
    for line in log.lines[-_MAX_LINES:]:
        at = seconds_in(line.text)
        if at is None:
            continue
        # Lines of several processes may be slightly out of order; a jump back by hours is midnight.
        if previous is not None and at < previous - _DAY_S // 2:
            day += 1
        previous, now = at, at + day * _DAY_S
        if line.step is not None and (not begins or line.step > begins[-1][0]):
            begins.append((line.step, float(now)))
    if now is None or len(begins) < _MIN_STEPS:
        return None
    lengths = [
        (later - sooner) / (step - before) for (before, sooner), (step, later) in pairwise(begins)
    ]
    stall = now - begins[-1][1]
    return stall if stall > max(_MIN_STALL_S, _TIMES * max(lengths)) else None
