"""The record of a scored group: what the journal keeps and the trainer is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.rollout.keys import GroupKey
from homeostat.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group with every reward's values, and what it came from, as the journal keeps it.

    The samples' rewards are not summed yet, because the weights and the run's moments do not belong
    to the group. `facts` is JSON: `policy_version`, `origin` and `sampled_with` say what the
    sampling depended on, for a run to judge whether the group still holds; `logged` has the values
    that reward functions handed to log_metric, by the metric's name; `verdicts`, if there are any,
    has [keep, reason] of the filters that are users' functions, by their path.
    """

    key: GroupKey
    group: RolloutGroup
    facts: Mapping[str, Any]
