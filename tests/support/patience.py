"""Time limits of the code under test, on machines that are busy.

A test of a limit sets a short one, and expects other things to happen within it: a process starts,
a healthy call is answered. On a busy machine they may come too late. Such a test is tried again
with a longer limit; a defect fails at every one. What must hold whatever the limit (that nothing is
left behind) is asserted after all attempts, not in one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

LIMITS_S = (1.0, 6.0, 40.0)


def eventually(is_so: Callable[[], bool], *, seconds: float = 60.0) -> bool:
    """Wait until the condition holds. Return False if it never does."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def patiently(check: Callable[[float], None], *, limits_s: tuple[float, ...] = LIMITS_S) -> None:
    """Call `check` with a limit in seconds, and with longer ones while it fails."""
    *tries, last = limits_s
    for limit_s in tries:
        try:
            check(limit_s)
        except (Exception, pytest.fail.Exception):
            continue
        return
    check(last)
