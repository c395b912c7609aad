"""Decide when to look at a run again, so that the doctor costs less than 1 % of the time."""

from __future__ import annotations

MAX_SHARE = 0.008
# Seconds that may be spent before the share counts: a run that is ill from its start is found soon.
ALLOWANCE_S = 2.0


class Pace:
    """Spend at most a share of the time, and look at most once in `interval_s`.

    Times are those of a monotonic clock, given by the caller.
    """

    def __init__(
        self,
        now: float,
        *,
        interval_s: float = 0.0,
        share: float = MAX_SHARE,
        allowance_s: float = ALLOWANCE_S,
    ) -> None:
        self.spent_s = 0.0
        self._start = now
        self._last: float | None = None
        self._interval_s = interval_s
        self._share = share
        self._allowance_s = allowance_s

    def is_due(self, now: float) -> bool:
        if self._last is not None and now - self._last < self._interval_s:
            return False
        return self.spent_s - self._allowance_s <= self._share * (now - self._start)

    def looked(self, now: float, seconds: float) -> None:
        """Note that a look took so many seconds."""
        self._last = now
        self.spent_s += seconds
