"""Turns the completions of a prompt into a group with the values of all rewards.

    completions -> text of what the policy wrote -> rewards, in worker processes -> RolloutGroup

Scoring runs in the background: the caller starts it and waits for its result later.
rollout/totals.py sums the rewards of a sample.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import filterfalse

from homeostat.data.tokenizer import ChatTokenizer
from homeostat.rewards.groups import ScoredGroup, UnscoredGroup
from homeostat.rewards.pool import PendingScore, RewardPool
from homeostat.types import Completion, Prompt, RolloutGroup, Sample

# Values that reward functions handed to log_metric, by the metric's name.
Logged = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A group whose rewards are being computed."""

    unscored: UnscoredGroup
    completions: Sequence[Completion]
    pending: PendingScore
    # Rewards whose logged values are counts of what a judge cost.
    judges: Collection[str] = ()

    def result(self) -> tuple[RolloutGroup, Logged]:
        """Wait for the rewards. Returns the group and what reward functions logged about it."""
        scored = self.pending.result()
        samples = [
            Sample(
                completion,
                self.unscored.texts[index],
                {name: values[index] for name, values in scored.values.items()},
                None,
                {name: cells[index] for name, cells in scored.extras.items()},
                scored.failed_on(index),
            )
            for index, completion in enumerate(self.completions)
        ]
        return RolloutGroup(self.unscored.prompt, tuple(samples)), _logged(scored, self.judges)


class Scorer:
    """Decodes completions and has them scored by the pool."""

    def __init__(self, rewards: RewardPool, tokenizer: ChatTokenizer, *, total_steps: int) -> None:
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.total_steps = total_steps

    def begin(
        self,
        prompt: Prompt,
        completions: Sequence[Completion],
        *,
        step: int,
        evaluates: bool = False,
    ) -> PendingGroup:
        """Start to score a group. Reward functions receive the step in their trainer state.

        Rewards of role eval score only groups that evaluate the policy.
        """
        ids = [completion.policy_tokens_T.tolist() for completion in completions]
        unscored = UnscoredGroup(prompt, [self._text(tokens) for tokens in ids], ids)
        pending = self.rewards.submit(
            unscored, step=step, total_steps=self.total_steps, evaluates=evaluates
        )
        return PendingGroup(unscored, completions, pending, self.rewards.judges)

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(list(filterfalse(self.tokenizer.is_special, tokens)))


def _logged(scored: ScoredGroup, judges: Collection[str]) -> Logged:
    """Return the logged values by the names that they have in the metrics."""
    found: Logged = {}
    for name, values in scored.metrics.items():
        label, _, own = name.partition("/")
        metric = f"judge/{own}" if label in judges else f"rewards/{label}/logged/{own}"
        found.setdefault(metric, []).extend(values)
    return found
