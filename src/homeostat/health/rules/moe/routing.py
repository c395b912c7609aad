"""Readings of routed tokens that several rules share.

Our own runs log how far the engine's choice of experts is the trainer's (moe/route_agreement), the
share of tokens whose choice was replayed (moe/replayed_share) and the share that would be routed
otherwise by now (moe/router_drift). Other frameworks log none of them.
"""

from __future__ import annotations

import numpy as np

from homeostat.health.failures.end_lines import End
from homeostat.health.rules.readings import is_true, mean_since, raw
from homeostat.health.rules.reward.rwd001_zero_std_groups import score_alike_because_right
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series
from homeostat.health.vital_signs.ending import MAX_QUIET_S, ending_of

# Names by which frameworks switch replay on, where their table does not map them to our key.
_SWITCHES = (
    "use_rollout_routing_replay",
    "use_routing_replay",
    "use_r3",
    "router_replay.mode",
    "enable_rollout_routing_replay",
)
_ON = ("ids", "weights", "r2", "r3")


def is_replaying(view: RunView) -> bool:
    """Return whether the settings ask for a replay of the routing."""
    asked = view.setting("model.moe.router_replay") or raw(view, *_SWITCHES)
    return is_true(asked) or str(asked).lower() in _ON


def newest(view: RunView, name: str, *, count: int = 5) -> Series | None:
    """Return the newest finite records of a metric; None if there are fewer than 3."""
    series = view.series(name)
    late = series.finite().tail(count) if series is not None else None
    return late if late is not None and len(late) >= 3 else None


def few_rows(view: RunView, since: int, *, share: float) -> str:
    """Return how many rows the newest updates of RL have, if too few to compare loads; else "".

    Only groups that are left out because they are right excuse it: a broken router makes answers
    wrong, and groups alike in that.
    """
    rows, alike = (
        view.series("data/trained_rows"),
        mean_since(view, "frac_reward_zero_std", step=since),
    )
    if view.kind is not Kind.RL or rows is None or not len(rows.since(since)) or not alike:
        return ""
    if not score_alike_because_right(view, since, alike):
        return ""
    before, now = median(rows.head(3).values), median(rows.since(since).values)
    if now >= share * before:
        return ""
    return f", in updates of {now:.0f} rows that had {before:.0f} at the start"


def few_records(view: RunView, series: Series, *, least: int) -> str:
    """Return how many records a run that has not ended has, if too few to judge; else "".

    A fresh router is uneven in its first updates, and evens out. A run that has ended is judged by
    what it has.
    """
    if len(series) >= least:
        return ""
    end = ending_of(view)
    is_open = end.how is End.OPEN and not end.is_stale
    is_written = end.how is End.UNKNOWN and view.facts.get("quiet_s", MAX_QUIET_S) < MAX_QUIET_S
    if not is_open and not is_written:
        return ""
    return f", in the first {len(series)} records of a run that may still be going on"


def first_over(series: Series, limit: float) -> int:
    """Return the first step of the newest run of records that are all above a limit."""
    under = np.flatnonzero(~(series.values > limit))
    start = int(under[-1]) + 1 if len(under) else 0
    return int(series.steps[min(start, len(series) - 1)])
