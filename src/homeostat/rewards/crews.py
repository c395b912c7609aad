"""Crews: rewards that share worker processes, and how groups are handed to them.

shared      the rewards that are plain functions: `rewards.workers` processes, group by group
judge       a separate process. It is handed all groups that wait, because its time is spent
            waiting for the endpoint, where answers do not depend on one another
classifier  a separate process, which holds the model. It is handed all groups of a round at
            once. What shares a forward pass may change the last bits of a score, so a batch
            must not depend on which group was sampled first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from homeostat.config.curriculum import FunctionFilter
from homeostat.config.model_rewards import ClassifierReward, JudgeReward
from homeostat.config.rewards import AnyReward

# A judge may take a little longer than its own limits: it has to notice that they have passed.
JUDGE_GRACE = 1.2


class PoolConfig(Protocol):
    """The functions of a pool's workers: a RewardsConfig, or the filters of a recipe."""

    @property
    def functions(self) -> Sequence[AnyReward | FunctionFilter]: ...

    @property
    def workers(self) -> int: ...

    @property
    def timeout_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Crew:
    """Rewards that the same processes compute.

    `gathers` says what a process is handed at a time: one group, all that wait, or all that were
    submitted before somebody waits for a result.
    """

    rewards: tuple[AnyReward | FunctionFilter, ...]
    num_workers: int
    timeout_s: float
    setting: str
    gathers: Literal["group", "waiting", "round"] = "group"
    # A request for n samples may take timeout_s * ceil(n / at_a_time); None: timeout_s in all.
    at_a_time: int | None = None
    # Time limit for loading; None: that of plain functions.
    load_s: float | None = None

    def limit_s(self, num_samples: int) -> float:
        """Return the time limit of a request, in seconds."""
        if self.at_a_time is None:
            return self.timeout_s
        return self.timeout_s * max(1, -(-num_samples // self.at_a_time))


def crews_of(config: PoolConfig) -> list[Crew]:
    """Return the crews of a run: one that is shared, and one for each reward that asks a model."""
    shared = tuple(one for one in config.functions if not isinstance(one, _ASK_A_MODEL))
    crews = [_own(one) for one in config.functions if isinstance(one, _ASK_A_MODEL)]
    if shared:
        crews.insert(0, Crew(shared, config.workers, config.timeout_s, "rewards.timeout_s"))
    return crews


_ASK_A_MODEL = (ClassifierReward, JudgeReward)


def _own(reward: ClassifierReward | JudgeReward) -> Crew:
    place = "rewards.functions[]"
    if isinstance(reward, JudgeReward):
        limit = reward.total_timeout_s * JUDGE_GRACE
        setting = f"{place}.total_timeout_s"
        return Crew((reward,), 1, limit, setting, "waiting", reward.concurrency)
    return Crew(
        (reward,),
        1,
        reward.timeout_s,
        f"{place}.timeout_s",
        gathers="round",
        at_a_time=reward.batch_size,
        load_s=reward.load_timeout_s,
    )
