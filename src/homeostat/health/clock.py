"""Read the times of log lines, to detect a run that hangs while its log continues."""

from __future__ import annotations

import re
from itertools import pairwise

from homeostat.health.log import Log

_TIME = re.compile(r"(?<!\d)(?P<h>[0-2]\d):(?P<m>[0-5]\d):(?P<s>[0-5]\d)(?![\d:])")
_MAX_HEAD = 120
_MAX_LINES = 4_000
_DAY_S = 86_400
# Number of steps with a known duration that are needed to detect one that takes too long.
_MIN_STEPS = 4
# The newest step hangs if it takes this many times as long as the longest one before it, and at
# least this many seconds.
_TIMES = 10.0
_MIN_STALL_S = 1_800.0


def seconds_in(text: str) -> int | None:
    """Return the time of day at the start of a line, in seconds; None if there is none."""
    found = _TIME.search(text[:_MAX_HEAD])
    if found is None:
        return None
    return int(found["h"]) * 3_600 + int(found["m"]) * 60 + int(found["s"])


def stalled_s(log: Log) -> float | None:
    """Return how many seconds the log continued after the last step began, if that is a hang.

    A step begins at the first line that belongs to it. None if the times are unknown, or if the
    newest step is not much longer than the earlier ones.
    """
    begins: list[tuple[int, float]] = []
    previous, day, now = None, 0, None
    for line in log.lines[-_MAX_LINES:]:
        at = seconds_in(line.text)
        if at is None:
            continue
        # Several processes may print slightly out of order; a jump back by many hours is midnight.
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
