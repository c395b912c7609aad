"""Gathers the rollouts of one step.

    draw prompts -> sample -> score -> journal -> totals -> keep, or drop for lack of a signal

A step draws in rounds. All requests of a round are submitted to the engine at once; the rewards of
a group start when its last completion is there, while others are still being sampled. Results are
taken in the order of drawing, and a barrier keeps the round in the journal before anything is
trained on it, so nothing that is drawn, kept or trained depends on what finished first.

A resumed run finds the rounds that it had finished in the journal and samples only the next one,
from its start, so that the engine sees the batch that it would have seen: the result is bitwise the
same. With dynamic sampling a step has further rounds, until enough groups have
samples that differ in reward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from homeostat.algorithms.baselines import has_signal
from homeostat.config.algorithm import DynamicSamplingConfig
from homeostat.config.moe import MoeConfig, ReplayMode
from homeostat.config.rewards import RewardsConfig
from homeostat.config.rollout import RolloutConfig
from homeostat.data.prompts import PromptSampler, PromptSet
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.observe.names import describe
from homeostat.rewards.combine import RewardMoments
from homeostat.rollout.engine import Sampling
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.journal import Journal
from homeostat.rollout.keys import GroupKey
from homeostat.rollout.route_buffer import RouteBuffer
from homeostat.rollout.sampled_with import sampled_with
from homeostat.rollout.sampler import Draw, Progress, Sampler
from homeostat.rollout.scorer import PendingGroup, Scorer
from homeostat.rollout.totals import with_totals
from homeostat.types import RolloutGroup

# Says what a step is at, for people who watch: (text, done, total).
Tell = Callable[[str, int, int], None]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepRollouts:
    """The groups that a step sampled: `groups` to train on, and `passed_over` without a signal."""

    groups: list[RolloutGroup] = field(default_factory=list)
    passed_over: list[RolloutGroup] = field(default_factory=list)
    num_rounds: int = 0
    num_replayed: int = 0
    # Seconds until the last completion of each round, and that were waited for rewards after it.
    generate_s: float = 0.0
    reward_s: float = 0.0
    # Sum and number of what functions handed to log_metric, by the metric's name.
    logged: dict[str, list[float]] = field(default_factory=dict)

    @property
    def all_groups(self) -> list[RolloutGroup]:
        return [*self.groups, *self.passed_over]

    def take_round(self, groups: Iterable[RolloutGroup], *, needs_signal: bool) -> None:
        """Keep the groups of a round; where a signal is needed, those whose rewards differ."""
        self.num_rounds += 1
        for group in groups:
            rewards_G = np.array([sample.reward for sample in group.samples], dtype=float)
            is_kept = not needs_signal or has_signal(rewards_G)
            (self.groups if is_kept else self.passed_over).append(group)

    def take_logged(self, logged: Iterable[Mapping[str, Sequence[float]]]) -> None:
        """Add what rewards logged about the groups of a round, in the order of drawing."""
        values: dict[str, list[float]] = {}
        for of_group in logged:
            for name, found in of_group.items():
                values.setdefault(name, []).extend(found)
        for name, found in values.items():
            if describe(name) is None:
                # Journals of earlier versions hold names that no function may log any more.
                log.warning("the logged metric %r is left out: its name cannot be used", name)
            elif found:
                total, count = self.logged.get(name, [0.0, 0])
                self.logged[name] = [total + float(sum(found)), count + len(found)]


class Collector:
    """Gathers the groups of a step from the engine, or from this run's journal."""

    def __init__(
        self,
        rollout: RolloutConfig,
        rewards: RewardsConfig,
        *,
        dynamic: DynamicSamplingConfig | None,
        prompts: PromptSet,
        prompt_sampler: PromptSampler,
        tokenizer: ChatTokenizer,
        sampler: Sampler | None,
        scorer: Scorer,
        moments: RewardMoments,
        journal: Journal,
        origin: str,
        moe: MoeConfig,
    ) -> None:
        """Create the collector of a run; a run that is complete has no sampler.

        `origin` identifies everything that rollouts depend on: groups in the journal are used only
        if theirs is the same.
        """
        self.rewards = rewards
        self.dynamic = dynamic
        self.prompts = prompts
        self.prompt_sampler = prompt_sampler
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.scorer = scorer
        self.moments = moments
        self.journal = journal
        self.moe = moe
        self.reconfigure(rollout, origin=origin)

    def reconfigure(self, rollout: RolloutConfig, *, origin: str) -> None:
        """Sample by these settings from now on."""
        self.rollout = rollout
        self.origin = origin
        self.sampling = training_sampling(rollout, self.tokenizer)
        self.sampled_with = sampled_with(self.sampling, self.tokenizer)

    def collect(self, step: int, *, tell: Tell) -> StepRollouts:
        """Return the groups of a step; those that were sampled now are in the journal."""
        wanted, dynamic = self.rollout.prompts_per_step, self.dynamic
        found = StepRollouts()
        buffer = RouteBuffer(self.moe.replay_buffer_bytes, self.journal, self.prompts.__getitem__)
        while len(found.groups) < wanted:
            keys = self._draw(step, found.num_rounds, wanted - len(found.groups))
            records = self._replayed(keys, found)
            if records is None:
                records = self._sampled(keys, found, tell)
            records = [buffer.take(record) for record in records]
            found.take_logged(record.facts["logged"] for record in records)
            groups = with_totals([one.group for one in records], self.rewards, self.moments)
            found.take_round(groups, needs_signal=dynamic is not None)
            if dynamic is not None and found.num_rounds == dynamic.max_rounds:
                break
        return found

    def _draw(self, step: int, round: int, count: int) -> dict[GroupKey, int]:
        """Draw prompts. Returns their ids by the keys of the groups, in the order of drawing."""
        prompt_ids = self.prompt_sampler.take(count)
        return {GroupKey(step, round, place): id for place, id in enumerate(prompt_ids)}

    def _replayed(
        self, keys: Mapping[GroupKey, int], found: StepRollouts
    ) -> list[GroupRecord] | None:
        """Return a round from the journal, or None if it has to be sampled."""
        try:
            records = [self.journal.read(key, self.prompts.__getitem__) for key in keys]
        except DataError:
            # Of prompts that are no more: a run without a checkpoint may begin again with others.
            records = []
        whole = [record for record in records if record is not None]
        if not whole and records:
            return None
        if [record.group.prompt.prompt_id for record in whole] != list(keys.values()) or any(
            {name: record.facts.get(name) for name in self._facts()} != self._facts()
            for record in whole
        ):
            log.warning(
                "the journal's groups of step %d are damaged, or of other settings, prompts, "
                "reward files or model weights: sampled anew",
                next(iter(keys)).step,
            )
            return None
        found.num_replayed += 1
        return whole

    def _facts(self) -> dict[str, Any]:
        """Return what a group of the journal must have in common with one sampled now."""
        assert self.sampler is not None, "sampling needs an engine"
        return {"policy_version": self.sampler.policy_version, "origin": self.origin}

    def _sampled(
        self, keys: Mapping[GroupKey, int], found: StepRollouts, tell: Tell
    ) -> list[GroupRecord]:
        """Sample and score a round, and keep it in the journal."""
        assert self.sampler is not None, "sampling needs an engine"
        facts = {**self._facts(), "sampled_with": self.sampled_with}
        started = time.perf_counter()
        pending = sample_and_score(
            [Draw(str(key), self.prompts[prompt_id]) for key, prompt_id in keys.items()],
            sampler=self.sampler,
            scorer=self.scorer,
            sampling=self.sampling,
            num_samples=self.rollout.samples_per_prompt,
            deadline_s=self.rollout.deadline_s,
            step=next(iter(keys)).step,
            progress=lambda done, total: tell("sampling", done, total),
            router_replay=self.moe.router_replay,
        )
        found.generate_s += time.perf_counter() - started
        records: list[GroupRecord] = []
        for key, one in zip(keys, pending, strict=True):
            tell("scoring", len(records), len(keys))
            started = time.perf_counter()
            group, logged = one.result()
            found.reward_s += time.perf_counter() - started
            records.append(GroupRecord(key, group, {**facts, "logged": logged}))
            self.journal.append(records[-1])
        self.journal.barrier()
        return records


def sample_and_score(
    draws: Sequence[Draw],
    *,
    sampler: Sampler,
    scorer: Scorer,
    sampling: Sampling,
    num_samples: int,
    step: int,
    deadline_s: float | None = None,
    progress: Progress = lambda done, total: None,
    router_replay: ReplayMode = "off",
    evaluates: bool = False,
) -> list[PendingGroup]:
    """Sample groups, and start the rewards of each as soon as it is whole.

    Returns when all are sampled: the groups in the order of drawing, some still being scored.
    """
    sampled = sampler.sample(
        draws,
        sampling=sampling,
        num_samples=num_samples,
        deadline_s=deadline_s,
        progress=progress,
        router_replay=router_replay,
    )
    pending = {
        place: scorer.begin(draws[place].prompt, completions, step=step, evaluates=evaluates)
        for place, completions in sampled
    }
    return [pending[place] for place in range(len(draws))]


def training_sampling(rollout: RolloutConfig, tokenizer: ChatTokenizer) -> Sampling:
    """Return the sampling parameters of rollouts that are trained on."""
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        stop_ids=tokenizer.stop_ids | frozenset(rollout.stop_token_ids),
        stop_strings=rollout.stop,
    )
