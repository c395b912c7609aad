"""Measure how far trainer and engine differ on the sampled tokens, by whatever was logged.

Frameworks log a difference of log-probs, of probabilities, a ratio or a KL estimate. Each has its
own scale: `usual` is what rounding in bf16 gives, `limit` what it does not explain, `broken` what
only other weights or other tokens do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from homeostat.health.rules.signs import newest
from homeostat.health.series.medians import median
from homeostat.health.view import RunView, Series


@dataclass(frozen=True, slots=True)
class Gap:
    """One measure of the distance. `series` is 0 where the two agree."""

    name: str
    series: Series
    usual: float
    limit: float
    broken: float

    @property
    def level(self) -> float:
        return median(self.series.finite().values)


# name -> usual, limit, broken. The first that was logged is taken.
_MEASURES: dict[str, tuple[float, float, float]] = {
    "sampling/sampling_logp_difference/mean": (0.02, 0.1, 1.0),
    "sampling/mult_prob_error": (0.03, 0.1, 1.5),
    "sampling/prob_difference/mean": (0.01, 0.05, 0.2),
    "sampling/k3": (0.001, 0.02, 0.5),
    # Signed; in the mean it is the same divergence as k3. Trainers that log it sample ahead, and
    # the age of the samples adds to it.
    "sampling/k1": (0.02, 0.05, 0.5),
}


def gap_of(view: RunView) -> Gap | None:
    """The distance, if anything tells it."""
    for name, (usual, limit, broken) in _MEASURES.items():
        series = view.series(name)
        if series is not None and len(series.finite()):
            # A multiplicative error is 1 where both agree.
            base = 1.0 if name == "sampling/mult_prob_error" else 0.0
            values = series.values - base
            if name == "sampling/k1":
                values = np.abs(values)
            return Gap(name, Series(series.steps, values), usual, limit, broken)
    return None


def staleness(view: RunView) -> float:
    """Mean age of the samples' policy, in steps; 0 where nothing says that there is any."""
    age = newest(view, "stale/steps/mean", count=20)
    if age is not None:
        return age
    interval, updates = view.number("sync.interval"), view.number("trainer.updates_per_step")
    behind = max(0.0, (interval or 1.0) / (updates or 1.0) - 1.0)
    return max(behind, view.number("rollout.max_staleness") or 0.0)


def is_other_policy(view: RunView) -> bool:
    """Fresh samples are so far from what the trainer would draw that the engine must have other
    weights: what they earn and how they end says little about the policy."""
    gap = gap_of(view)
    if gap is None or staleness(view) > 0.0:
        return False
    return median(gap.series.finite().values[-3:]) > gap.broken
