"""The metric catalogue: every metric name with its unit, its meaning and how it is reduced.

A record of `metrics.jsonl` covers all steps since the record before it. `reduce` says how the
values of these steps are combined into the value of the record:

    mean   plain mean over the steps
    rate   mean over the steps weighted by time/step: all tokens over all seconds
    last   the newest value (counters, schedules, gauges)
    sum    total over the steps
    max    the largest value
    min    the smallest value

If one value is NaN the result is NaN, and an infinity is never averaged away, so no bad value is
hidden. A metric with `own_step` belongs to exactly one step, so logging it closes the record there.
"""

from __future__ import annotations

import re

from homeostat.observe.catalogue import evaluation, policy, precision, sampling, updates
from homeostat.observe.catalogue.info import MetricInfo, Reduce

__all__ = ["CATALOGUE", "MetricInfo", "Reduce", "describe"]

CATALOGUE: tuple[MetricInfo, ...] = (
    *policy.METRICS,
    *sampling.METRICS,
    *evaluation.METRICS,
    *updates.METRICS,
    *precision.METRICS,
)

_HOLES = {
    "<i>": r"(?:0|[1-9]\d*)",
    "<name>": r"[A-Za-z0-9_.-]+",
    # No control characters, no line or bidi controls, no lone surrogates.
    "<text>": r"[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]{1,100}",
}
_EXACT = {info.name: info for info in CATALOGUE if "<" not in info.name}
_PATTERNS = {
    re.compile(re.sub("|".join(_HOLES), lambda hole: _HOLES[hole.group()], info.name)): info
    for info in CATALOGUE
    if "<" in info.name
}


def describe(name: str) -> MetricInfo | None:
    """Return the catalogue entry of a metric name, or None if there is none."""
    if name in _EXACT:
        return _EXACT[name]
    return next((info for pattern, info in _PATTERNS.items() if pattern.fullmatch(name)), None)
