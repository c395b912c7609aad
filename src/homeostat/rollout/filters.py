"""Decide which scored groups are trained on; a group that is dropped has a reason.

    scored group -> verdicts of users' functions, in workers -> journal
                 -> totals -> the recipe's filters in order -> None (keep), or the reason

The first filter that drops a group names the reason, and the metric filter/<reason> counts it.
algorithm.dynamic_sampling comes before rollout.filters. The built-in filters are pure functions of
the group as it is trained on. A user's function may do anything, so its verdict is in the journal
with the group: a resumed run does not ask again.

A function that fails on a group (it raises, hangs or returns nonsense) drops the group with the
reason filter_failed: nobody knows whether it should be trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from homeostat.algorithms.baselines import has_signal
from homeostat.config.curriculum import (
    AllFailedFilter,
    AnyFilter,
    FunctionFilter,
    RewardMeanFilter,
    TruncatedFilter,
    ZeroSpreadFilter,
    as_label,
)
from homeostat.config.policy_gradient import DynamicSamplingConfig
from homeostat.config.rewards import RewardsConfig
from homeostat.config.rollout import RolloutConfig
from homeostat.data.prompts import Outcome
from homeostat.rewards.calls import TrainerState
from homeostat.rewards.combine import weighted_sum
from homeostat.rewards.filter_calls import REASON, FilterCall
from homeostat.rewards.groups import UnscoredGroup
from homeostat.rewards.pool import PendingScore, RewardPool
from homeostat.rewards.solved import deciding_rewards, is_solved
from homeostat.types import RolloutGroup

FAILED, OTHER = "filter_failed", "other"
# Number of reasons in a step that get separate metrics. The others share one metric.
MAX_REASONS = 20

# The reasons of the built-in filters. They have a metric even in steps that drop nothing.
REASONS: dict[str, tuple[str, ...]] = {
    "zero_spread": ("all_same_reward",),
    "reward_mean": ("reward_low", "reward_high"),
    "truncated": ("too_long",),
    "all_failed": ("all_failed",),
    "function": (FAILED,),
}

# The verdicts of users' functions on a group, by the function's path: [keep, reason].
Verdicts = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class SolvedBy:
    """The rewards that decide whether a sample is solved, and the value that it takes."""

    labels: tuple[str, ...]
    at: float

    @classmethod
    def of(cls, rollout: RolloutConfig, rewards: RewardsConfig) -> SolvedBy | None:
        """Return the deciding rewards; None if nothing depends on them."""
        if not rollout.judges_samples:
            return None
        # Gold rewards are not computed in training.
        trained = rewards.model_copy(update={"functions": rewards.trained})
        judges = deciding_rewards(trained, solved_by=rollout.solved_by)
        assert "" in judges, "combinations asks for rollout.solved_by"
        return cls(judges[""], rollout.solved_at)

    def outcome(self, group: RolloutGroup) -> Outcome:
        """Return the share of a group's judged samples that are solved."""
        found = [is_solved(sample, self.labels, at=self.at) for sample in group.samples]
        judged = [verdict for verdict in found if verdict is not None]
        rate = sum(judged) / len(judged) if judged else None
        return Outcome(group.prompt.prompt_id, rate)


class GroupFilters:
    """The filters of a recipe, in order."""

    def __init__(
        self,
        rollout: RolloutConfig,
        *,
        dynamic: DynamicSamplingConfig | None,
        solved_by: SolvedBy | None,
    ) -> None:
        first = () if dynamic is None else (ZeroSpreadFilter(type="zero_spread"),)
        self.filters: tuple[AnyFilter, ...] = (*first, *rollout.filters)
        self.solved_by = solved_by
        # None: every group is kept, so that a step has one round.
        self.max_rounds = (dynamic or rollout).max_rounds if self.filters else None

    @property
    def functions(self) -> tuple[FunctionFilter, ...]:
        """Return the filters that are users' functions."""
        return tuple(one for one in self.filters if isinstance(one, FunctionFilter))

    def counted(self, reasons: Sequence[str]) -> dict[str, float]:
        """Return the metrics of the groups that a step dropped, by reason."""
        counts = {name: 0.0 for one in self.filters for name in REASONS[one.type]}
        for reason in reasons:
            name = reason if reason in counts or len(counts) < MAX_REASONS else OTHER
            counts[name] = counts.get(name, 0.0) + 1.0
        return {f"filter/{reason}": count for reason, count in counts.items()}

    def reason(self, group: RolloutGroup, verdicts: Verdicts) -> str | None:
        """Return why a group is dropped; None if it is kept."""
        found = (self._ask(one, group, verdicts) for one in self.filters)
        return next((reason for reason in found if reason is not None), None)

    def _ask(self, one: AnyFilter, group: RolloutGroup, verdicts: Verdicts) -> str | None:
        match one:
            case ZeroSpreadFilter():
                return _zero_spread(group)
            case RewardMeanFilter():
                return _reward_mean(group, one)
            case TruncatedFilter():
                cut = [sample.completion.stop_reason.is_cut for sample in group.samples]
                return "too_long" if float(np.mean(cut)) > one.max_share else None
            case AllFailedFilter():
                assert self.solved_by is not None, "this filter asks for it"
                return "all_failed" if self.solved_by.outcome(group).rate == 0 else None
            case FunctionFilter():
                keep, reason = verdicts[one.label]
                return None if keep else as_label(reason or one.default_reason)


def _rewards(group: RolloutGroup) -> np.ndarray:
    """Return the rewards of a group as they are trained on; NaN where there is none."""
    return np.array([sample.reward for sample in group.samples], dtype=float)


def _zero_spread(group: RolloutGroup) -> str | None:
    rewards_G = _rewards(group)
    if has_signal(rewards_G):
        return None
    return "all_same_reward" if np.isfinite(rewards_G).sum() > 1 else "too_few_rewards"


def _reward_mean(group: RolloutGroup, bounds: RewardMeanFilter) -> str | None:
    known = _rewards(group)
    known = known[np.isfinite(known)]
    if not len(known):
        return "too_few_rewards"
    mean = float(known.mean())
    if bounds.low is not None and mean < bounds.low:
        return "reward_low"
    return "reward_high" if bounds.high is not None and mean > bounds.high else None


@dataclass(frozen=True, slots=True)
class FilterFunctions:
    """The functions of filters as the workers of a pool need them."""

    functions: tuple[FunctionFilter, ...]
    timeout_s: float
    workers: int = 1


@dataclass(frozen=True, slots=True)
class PendingVerdicts:
    """A group whose verdicts the users' functions are computing."""

    pending: PendingScore

    def result(self) -> dict[str, list[Any]]:
        """Wait for the verdicts: [keep, reason] by the function's path, as JSON."""
        scored = self.pending.result()
        found: dict[str, list[Any]] = {}
        for label, values in scored.values.items():
            if values[0] is None:
                found[label] = [False, FAILED]
            else:
                reason = scored.extras[f"{label}/{REASON}"][0]
                found[label] = [bool(values[0]), str(reason)]
        return found


class FilterJudges:
    """Calls users' functions on scored groups, in the worker processes of a pool."""

    def __init__(self, pool: RewardPool, rewards: RewardsConfig, *, total_steps: int) -> None:
        self.pool = pool
        self.total_steps = total_steps
        self._weights = {reward.label: reward.weight for reward in rewards.trained}

    def begin(self, group: RolloutGroup, *, step: int) -> PendingVerdicts:
        """Start to call the functions on a group whose samples have the values of all rewards."""
        samples, prompt = group.samples, group.prompt
        texts = [sample.text for sample in samples]
        ids = [sample.completion.policy_tokens_T.tolist() for sample in samples]
        call = FilterCall(
            prompt.prompt,
            texts,
            ids,
            dict(prompt.columns),
            TrainerState(global_step=step, max_steps=self.total_steps),
            rewards=[weighted_sum(s.rewards, self._weights, failed=s.failed) for s in samples],
            reward_values={name: [s.rewards[name] for s in samples] for name in self._weights},
            truncated=[sample.completion.stop_reason.is_cut for sample in samples],
        )
        return PendingVerdicts(self.pool.submit_call(UnscoredGroup(prompt, texts, ids), call))
