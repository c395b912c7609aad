"""The progress of a run, which a checkpoint stores in addition to tensors and the position in the
data.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from homeostat.errors import CheckpointError
from homeostat.train.cores import Way
from homeostat.types import Role

# Older checkpoints have none of it.
_LATER = {
    "chosen_tokens",
    "critic_skipped_in_a_row",
    "judged_at",
    "own_rewards",
    "reference_weights",
}
# The values of trainer.threads and trainer.lanes.
_LARGEST = {"threads": 1024, "lanes": 64}


@dataclass(slots=True)
class RunState:
    step: int = 0
    num_tokens: int = 0
    num_skipped: int = 0
    # Kept when the run is resumed: a run that only skips updates must halt, however often it is
    # resumed.
    skipped_in_a_row: int = 0
    # The same of a critic, whose updates are separate.
    critic_skipped_in_a_row: int = 0
    best_eval: float | None = None
    best_step: int | None = None
    evals_without_better: int = 0
    # The step at which an evaluation was judged last.
    judged_at: int | None = None
    stopped_early: bool = False
    # The most tokens of a micro-batch; None until memory ran out once.
    token_budget: int | None = None
    # Kept when the run is resumed, because the last bits of sums depend on them.
    threads: int | None = None
    lanes: int | None = None
    # Tokens of a micro-batch that the run chose itself; None if the recipe sets them.
    chosen_tokens: int | None = None
    # Digest of the weights that scored the rows of preference training before the first step; None
    # if no scores of a reference are kept.
    reference_weights: str | None = None

    def judge(self, value: float, *, min_delta: float, higher_is_better: bool = False) -> bool:
        """Record an evaluation. Returns whether it is the best so far; one that is not finite never
        is.
        """
        self.judged_at = self.step
        sign = -1.0 if higher_is_better else 1.0
        best = math.inf if self.best_eval is None else sign * self.best_eval
        better = math.isfinite(value) and sign * value < best - min_delta
        if better:
            self.best_eval, self.best_step = value, self.step
        self.evals_without_better = 0 if better else self.evals_without_better + 1
        return better

    def count_skipped(self, role: Role, *, applied: bool) -> int:
        """Record whether an update of a role was applied. Returns how many in a row were not."""
        name = "critic_skipped_in_a_row" if role is Role.CRITIC else "skipped_in_a_row"
        setattr(self, name, 0 if applied else getattr(self, name) + 1)
        return getattr(self, name)

    @property
    def way(self) -> Way | None:
        """The use of the cores; None if the run has not begun."""
        if self.threads is None or self.lanes is None:
            return None
        return Way(self.lanes, self.threads)

    @way.setter
    def way(self, used: Way) -> None:
        self.lanes, self.threads = used.lanes, used.threads

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any], *, place: str) -> RunState:
        """`place` names the file, for a message about a field that is none of ours."""
        return cls(**_checked(cls, fields, f"{place}: run"))


@dataclass(slots=True)
class RlState:
    """The further state that reinforcement learning has."""

    # None if the algorithm has no KL term.
    kl_coefficient: float | None = None
    # Of all rewards so far: number, mean, and sum of squared distances from it.
    rewards_count: int = 0
    rewards_mean: float = 0.0
    rewards_squares: float = 0.0
    # The same of each reward that is standardised by itself, as a list of the three numbers.
    own_rewards: dict = field(default_factory=dict)
    # The step whose weights the engine samples with.
    published_version: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any], *, place: str) -> RlState:
        return cls(**_checked(cls, fields, f"{place}: rl"))


def _checked(cls: type, fields: dict[str, Any], place: str) -> dict[str, Any]:
    kinds = get_type_hints(cls)
    for name in sorted((kinds.keys() ^ fields.keys()) - _LATER):
        raise CheckpointError(f"{place}.{name} is missing or not known.")
    for name, value in fields.items():
        if not _fits(name, value, kinds[name]):
            raise CheckpointError(f"{place}.{name} cannot be {value!r:.60}.")
    return fields


def _fits(name: str, value: Any, kind: Any) -> bool:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return False
    smallest = 1 if name in ("threads", "lanes", "token_budget", "chosen_tokens") else 0
    return not isinstance(value, int) or smallest <= value <= _LARGEST.get(name, 2**62)
