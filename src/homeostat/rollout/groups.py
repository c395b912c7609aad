"""The record of a scored group, which the journal keeps and the trainer receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.rollout.keys import GroupKey
from homeostat.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group with the values of every reward, and its origin, as the journal keeps it.

    The samples' rewards are not summed yet, because the weights and the run's moments do not belong
    to the group. `facts` is JSON: `policy_version`, `origin` and `sampled_with` say what the
    sampling depended on, from which a run judges whether the group is still valid; `logged` has the
    values that reward functions handed to log_metric, by the metric's name; `verdicts`, if there
    are any, has [keep, reason] of the filters that are users' functions, by their path.
    """

    key: GroupKey
    group: RolloutGroup
    facts: Mapping[str, Any]
