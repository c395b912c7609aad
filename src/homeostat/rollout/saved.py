"""Gathers the rollouts of a step from the journal of another run (debug.rollouts).

    journal -> checks that they mean the same here -> totals -> keep, or drop for a reason

Nothing is sampled or scored: only the sums of the rewards are recomputed with this run's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from homeostat.config.moe import MoeConfig
from homeostat.config.rewards import RewardsConfig
from homeostat.config.rollout import RolloutConfig
from homeostat.data.prompts import PromptDraws, PromptSet
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.rewards.combine import RewardMoments
from homeostat.rollout.collect import StepRollouts, Tell, training_sampling, verdicts_of
from homeostat.rollout.filters import GroupFilters
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.journal import Journal
from homeostat.rollout.route_buffer import RouteBuffer
from homeostat.rollout.sampled_with import require_same_sampling, sampled_with
from homeostat.rollout.totals import with_totals
from homeostat.types import RolloutGroup


class SavedRollouts:
    """Gathers the groups of a step from the journal of another run."""

    def __init__(
        self,
        rollout: RolloutConfig,
        rewards: RewardsConfig,
        *,
        filters: GroupFilters,
        prompts: PromptSet,
        prompt_sampler: PromptDraws,
        tokenizer: ChatTokenizer,
        moments: RewardMoments,
        saved: Journal,
        moe: MoeConfig,
    ) -> None:
        self.rollout = rollout
        self.rewards = rewards
        self.filters = filters
        self.prompts = prompts
        self.prompt_sampler = prompt_sampler
        self.moments = moments
        self.saved = saved
        self.moe = moe
        self.sampled_with = sampled_with(training_sampling(rollout, tokenizer), tokenizer)

    def collect(self, step: int, *, tell: Tell) -> StepRollouts:
        """Return the groups of a step. Raises DataError if there are none that this run can use."""
        wanted = self.rollout.prompts_per_step
        found = StepRollouts()
        buffer = RouteBuffer(self.moe.replay_buffer_bytes, self.saved, self.prompts.__getitem__)
        for records in self._rounds(step):
            tell("reading", found.num_rounds, found.num_rounds + 1)
            self._require_same(records)
            self.prompt_sampler.draw(len(records), step=step, round=found.num_rounds)
            found.num_replayed += 1
            found.take_logged(record.facts.get("logged", {}) for record in records)
            kept = [buffer.take(record).group for record in records]
            groups = with_totals(kept, self.rewards, self.moments)
            found.take_round(groups, self.filters, [verdicts_of(record) for record in records])
            enough = len(found.groups) >= wanted
            if enough or found.num_rounds == self.filters.max_rounds:
                break
        return found

    def _rounds(self, step: int) -> list[list[GroupRecord]]:
        """Return the rounds of a step up to the first incomplete one."""
        rounds = []
        for _, keys in groupby(self.saved.keys(step), key=lambda key: key.round):
            records = [self.saved.read(key, self.prompts.__getitem__) for key in keys]
            whole = [record for record in records if record is not None]
            if len(whole) < len(records):
                break
            rounds.append(whole)
        if not rounds:
            steps = self.saved.steps()
            has = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
            raise DataError(
                f"debug.rollouts: {self.saved.folder} holds {has}, and not step {step}. Set "
                "trainer.max_steps to what is there."
            )
        return rounds

    def _require_same(self, records: Sequence[GroupRecord]) -> None:
        folder = self.saved.folder
        for record in records:
            stored = record.facts.get("sampled_with")
            require_same_sampling(stored, self.sampled_with, folder=folder)
        self._require_rewards([record.group for record in records])
        self._require_verdicts(records)

    def _require_verdicts(self, records: Sequence[GroupRecord]) -> None:
        """Raise DataError if a function of rollout.filters has no saved verdicts."""
        stored = set.intersection(*(set(verdicts_of(record)) for record in records))
        for one in self.filters.functions:
            if one.label not in stored:
                raise DataError(
                    f"debug.rollouts: the rollouts in {self.saved.folder} have no verdicts of the "
                    f"filter {one.label!r}, and none is asked anew. Remove it from rollout.filters."
                )

    def _require_rewards(self, groups: Sequence[RolloutGroup]) -> None:
        """Raise DataError if a reward of this run has no saved values: none is computed here."""
        stored = groups[0].samples[0].rewards
        labels = [reward.label for reward in self.rewards.trained]
        unknown = [label for label in labels if label not in stored]
        if unknown:
            raise DataError(
                f"debug.rollouts: the rollouts in {self.saved.folder} have no values of the reward "
                f"{unknown[0]!r} (they have: {', '.join(stored)}), and none is computed anew. Name "
                "those in rewards.functions; their weights may be others."
            )
