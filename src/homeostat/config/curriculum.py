"""Settings of which prompts and rows a step gets: mixing of sources, filters, curricula.

data.train[].weight    how the sources share a step, at every step of the run
rollout.curriculum     which prompts of a source are drawn, and which are drawn again
rollout.filters        which sampled groups are trained on
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from homeostat.config.base import Settings, key
from homeostat.config.reward_base import CALL_KEYWORDS

# Keyword arguments that every filter function receives.
FILTER_KEYWORDS = (*CALL_KEYWORDS, "rewards", "reward_values", "truncated")

# A label in a metric's name, as `<name>` stands for it in observe/names.py.
MAX_LABEL_CHARS = 60
_NOT_IN_A_LABEL = re.compile(r"[^A-Za-z0-9_.-]+")


def as_label(text: str) -> str:
    """Return a text as the last part of a metric's name: filter/<label>, data/share/<label>.

    Whatever metric names cannot hold (slashes, spaces, control characters) becomes an underscore.
    """
    label = _NOT_IN_A_LABEL.sub("_", text)[:MAX_LABEL_CHARS].strip("_")
    return label or "unnamed"


class WeightPoint(Settings):
    """The weight of a source at a step."""

    step: int = key(ge=1, help="Step, counted from 1.")
    weight: float = key(ge=0, help="Weight of the source at this step; 0 leaves it out.")


class WeightSchedule(Settings):
    """A weight that changes over the steps of the run."""

    points: tuple[WeightPoint, ...] = key(
        min_length=1,
        help="Weights by step, in ascending order of steps. The first weight applies before its "
        "step as well, and the last one until the end.",
    )
    between: Literal["linear", "hold"] = key(
        "linear",
        help="The weight between two points. linear: interpolate linearly. hold: use the weight "
        "of the earlier point.",
    )

    @model_validator(mode="after")
    def check_order(self) -> WeightSchedule:
        """Refuse points that are not in the order of steps."""
        for before, after in pairwise(self.points):
            if after.step <= before.step:
                raise ValueError(
                    f"step {after.step} comes after step {before.step}: list the points in the "
                    "order of steps, each step once"
                )
        return self

    def at(self, step: int) -> float:
        """Return the weight of a step."""
        place = bisect_right([point.step for point in self.points], step)
        if place == 0:
            return self.points[0].weight
        before = self.points[place - 1]
        if place == len(self.points) or self.between == "hold":
            return before.weight
        after = self.points[place]
        share = (step - before.step) / (after.step - before.step)
        return (1.0 - share) * before.weight + share * after.weight


SourceWeight = Annotated[float, Field(ge=0)] | WeightSchedule


def weight_at(weight: float | WeightSchedule, step: int) -> float:
    """Return the weight of a source at a step."""
    return weight.at(step) if isinstance(weight, WeightSchedule) else weight


class ZeroSpreadFilter(Settings):
    """Drop groups whose samples all have the same reward: their advantages are 0.

    Reasons: all_same_reward, and too_few_rewards where rewards failed on all samples but one.
    """

    type: Literal["zero_spread"]


class RewardMeanFilter(Settings):
    """Drop groups whose mean reward lies outside bounds (reasons: reward_low, reward_high)."""

    type: Literal["reward_mean"]
    low: float | None = key(None, help="Smallest mean reward of a group that is kept.")
    high: float | None = key(None, help="Largest mean reward of a group that is kept.")

    @model_validator(mode="after")
    def check_bounds(self) -> RewardMeanFilter:
        """Refuse bounds that keep everything or nothing."""
        if self.low is None and self.high is None:
            raise ValueError("this filter would keep every group: set low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(
                f"this filter would keep no group: low ({self.low:g}) is above high ({self.high:g})"
            )
        return self


class TruncatedFilter(Settings):
    """Drop groups in which too many completions were cut off (reason: too_long)."""

    type: Literal["truncated"]
    max_share: float = key(
        0.5, ge=0, lt=1, help="Largest share of truncated completions in a group that is kept."
    )


class AllFailedFilter(Settings):
    """Drop groups in which no sample is solved (reason: all_failed); see rollout.solved_by."""

    type: Literal["all_failed"]


class FunctionFilter(Settings):
    """Your function: f(completions, rewards=, **columns) -> True, False or (keep, reason).

    It is called once for each scored group, in a worker process, under rewards.timeout_s.
    """

    type: Literal["function"]
    path: str = key(
        pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$",
        share="name",
        help="package.module:function or folder/file.py:function.",
    )
    options: dict[str, bool | int | float | str] = key(
        {}, help="Further keyword arguments for the function."
    )

    @model_validator(mode="after")
    def check_options(self) -> FunctionFilter:
        """Refuse options that would collide with arguments that every filter receives."""
        if taken := sorted(set(self.options) & set(FILTER_KEYWORDS)):
            raise ValueError(
                f"options.{taken[0]}: every filter already gets an argument {taken[0]}"
            )
        return self

    @property
    def label(self) -> str:
        """Return the name by which errors and the journal know it."""
        return self.path

    @property
    def default_reason(self) -> str:
        """Return the reason of a group that the function drops without naming one."""
        return self.path.rpartition(":")[2]


AnyFilter = Annotated[
    ZeroSpreadFilter | RewardMeanFilter | TruncatedFilter | AllFailedFilter | FunctionFilter,
    Field(discriminator="type"),
]


class VariancePreference(Settings):
    """Weight a prompt by p (1 - p), the variance of its reward if it is solved at the rate p."""

    type: Literal["variance"] = "variance"

    def weight(self, rate: float) -> float:
        """Return the weight of a prompt that is solved at a rate."""
        return rate * (1.0 - rate)


class BandPreference(Settings):
    """Prefer the prompts whose solve rate lies in a band."""

    type: Literal["band"]
    low: float = key(0.2, ge=0, le=1, help="Smallest solve rate that is preferred.")
    high: float = key(0.8, ge=0, le=1, help="Largest solve rate that is preferred.")

    @model_validator(mode="after")
    def check_bounds(self) -> BandPreference:
        """Refuse a band without any rate."""
        if self.low > self.high:
            raise ValueError(
                f"no solve rate is preferred, because low ({self.low:g}) is above high "
                f"({self.high:g})"
            )
        return self

    def weight(self, rate: float) -> float:
        """Return the weight of a prompt that is solved at a rate."""
        return float(self.low <= rate <= self.high)


AnyPreference = Annotated[VariancePreference | BandPreference, Field(discriminator="type")]


class DifficultyConfig(Settings):
    """Draw prompts by how often they were solved so far, instead of once per epoch."""

    prefer: AnyPreference = key(
        VariancePreference(), help="How the weight of a prompt depends on its estimated solve rate."
    )
    explore: float = key(
        0.1,
        gt=0,
        le=1,
        help="Share of the draws that are made from all prompts, whatever their solve rate, so "
        "that no prompt is excluded for good.",
    )
    memory: float = key(
        0.7,
        ge=0,
        lt=1,
        help="Weight of the old estimate when a prompt is sampled again and its estimate is "
        "updated. 0: only the newest group counts.",
    )
    prior: float = key(
        0.5, ge=0, le=1, help="Solve rate that is assumed for prompts that were never sampled."
    )


class ReplayConfig(Settings):
    """Draw prompts again that were failed or solved some steps earlier."""

    of: Literal["failed", "solved"] = key(
        "failed",
        help="failed: prompts whose newest group has no solved sample. solved: prompts whose "
        "newest group has only solved samples.",
    )
    share: float = key(
        0.25,
        gt=0,
        le=1,
        help="Largest share of such prompts, averaged over the steps: 0.25 of 2 prompts is one "
        "in every second step.",
    )
    max_times: int = key(3, ge=1, help="How many times in the run a prompt may be drawn again.")
    max_age_steps: int = key(
        100,
        ge=1,
        help="Number of steps after its newest group during which a prompt may be drawn again.",
    )


class CurriculumConfig(Settings):
    """Draw prompts by difficulty, and draw failed or solved prompts again."""

    difficulty: DifficultyConfig | None = key(
        None, help="Draw prompts by their estimated solve rate. null: each prompt once per epoch."
    )
    replay: ReplayConfig | None = key(
        None, help="Draw some failed or solved prompts again. null: none."
    )

    @model_validator(mode="after")
    def check_content(self) -> CurriculumConfig:
        """Refuse a curriculum that does nothing."""
        if self.difficulty is None and self.replay is None:
            raise ValueError("a curriculum needs difficulty, replay or both")
        return self
