"""Gathers the rollouts of one step.

    draw prompts -> sample -> score -> journal -> totals -> keep, or drop for a reason

A step draws in rounds. All requests of a round are submitted to the engine at once; the rewards of
a group are computed as soon as its last completion is finished, while other groups are still being
sampled. Results are processed in the order of drawing, and a barrier writes the round to the
journal before the trainer uses it. Therefore which groups are drawn, kept and trained on does not
depend on which finished first.

A resumed run reads its finished rounds from the journal and samples only the next one, from its
start. The engine then gets the same batch as without the interruption, so the result is bitwise the
same. With filters (rollout/filters.py), such as dynamic sampling, a step samples further rounds
until enough groups are kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from homeostat.config.moe import MoeConfig, ReplayMode
from homeostat.config.rewards import RewardsConfig
from homeostat.config.rollout import RolloutConfig
from homeostat.data.prompts import PromptDraws, PromptSet
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.observe.names import describe
from homeostat.rewards.combine import RewardMoments
from homeostat.rollout.engine import Sampling
from homeostat.rollout.filters import FilterJudges, GroupFilters, PendingVerdicts, Verdicts
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.journal import Journal
from homeostat.rollout.keys import GroupKey
from homeostat.rollout.route_buffer import RouteBuffer
from homeostat.rollout.sampled_with import sampled_with
from homeostat.rollout.sampler import Draw, Progress, Sampler
from homeostat.rollout.scorer import PendingGroup, Scorer
from homeostat.rollout.totals import with_totals
from homeostat.types import RolloutGroup

# Reports the progress of a step to the user: (text, done, total).
Tell = Callable[[str, int, int], None]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepRollouts:
    """The groups that a step sampled: `groups` are trained on.

    Filters dropped the groups in `passed_over`, each for one of `reasons`.
    """

    groups: list[RolloutGroup] = field(default_factory=list)
    passed_over: list[RolloutGroup] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    num_rounds: int = 0
    num_replayed: int = 0
    # Seconds until the last completion of each round, and seconds spent waiting for rewards after
    # it.
    generate_s: float = 0.0
    reward_s: float = 0.0
    # Sum and number of the values that functions passed to log_metric, by the metric's name.
    logged: dict[str, list[float]] = field(default_factory=dict)

    @property
    def all_groups(self) -> list[RolloutGroup]:
        return [*self.groups, *self.passed_over]

    def take_round(
        self, groups: Sequence[RolloutGroup], filters: GroupFilters, verdicts: Sequence[Verdicts]
    ) -> None:
        """Keep the groups of a round that no filter drops."""
        self.num_rounds += 1
        for group, of_functions in zip(groups, verdicts, strict=True):
            reason = filters.reason(group, of_functions)
            if reason is None:
                self.groups.append(group)
            else:
                self.passed_over.append(group)
                self.reasons.append(reason)

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
        filters: GroupFilters,
        judges: FilterJudges | None,
        prompts: PromptSet,
        prompt_sampler: PromptDraws,
        tokenizer: ChatTokenizer,
        sampler: Sampler | None,
        scorer: Scorer,
        moments: RewardMoments,
        journal: Journal,
        origin: str,
        moe: MoeConfig,
        is_strided: bool = False,
    ) -> None:
        """Create the collector of a run; a run that is complete has no sampler.

        `judges` calls the filters that are users' functions; None if there are none. `origin`
        identifies everything that rollouts depend on: groups in the journal are used only if they
        have the same origin.
        """
        self.rewards = rewards
        self.filters = filters
        self.judges = judges
        self.prompts = prompts
        self.prompt_sampler = prompt_sampler
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.scorer = scorer
        self.moments = moments
        self.journal = journal
        self.moe = moe
        self.is_strided = is_strided
        self.reconfigure(rollout, origin=origin)

    def reconfigure(self, rollout: RolloutConfig, *, origin: str) -> None:
        """Sample by these settings from now on."""
        self.rollout = rollout
        self.origin = origin
        self.sampling = training_sampling(rollout, self.tokenizer, is_strided=self.is_strided)
        self.sampled_with = sampled_with(self.sampling, self.tokenizer)

    def collect(self, step: int, *, tell: Tell) -> StepRollouts:
        """Return the groups of a step. Newly sampled groups are in the journal by then."""
        wanted = self.rollout.prompts_per_step
        found = StepRollouts()
        buffer = RouteBuffer(self.moe.replay_buffer_bytes, self.journal, self.prompts.asked)
        while len(found.groups) < wanted:
            records = self._round(step, wanted - len(found.groups), found, tell)
            records = [buffer.take(record) for record in records]
            found.take_logged(record.facts["logged"] for record in records)
            groups = with_totals([one.group for one in records], self.rewards, self.moments)
            found.take_round(groups, self.filters, [verdicts_of(record) for record in records])
            if found.num_rounds == self.filters.max_rounds:
                break
        self._learn(step, found)
        return found

    def _learn(self, step: int, found: StepRollouts) -> None:
        """Report to the prompt order how often the prompts of a step were solved."""
        if (solved_by := self.filters.solved_by) is not None:
            groups = sorted(found.all_groups, key=lambda group: group.prompt.prompt_id)
            self.prompt_sampler.learn(step, [solved_by.outcome(group) for group in groups])

    def _round(self, step: int, count: int, found: StepRollouts, tell: Tell) -> list[GroupRecord]:
        """Draw the prompts of the next round, and return their groups."""
        keys = self._draw(step, found.num_rounds, count)
        records = self._replayed(keys, self._facts())
        if records is None:
            return self._sampled(keys, found, tell)
        found.num_replayed += 1
        return records

    def _draw(self, step: int, round: int, count: int) -> dict[GroupKey, int]:
        """Draw rows. Returns the ids of their prompts by the keys of the groups, in order."""
        rows = self.prompt_sampler.draw(count, step=step, round=round)
        prompt_ids = [prompt_id for row in rows for prompt_id in self.prompts.drawn(row)]
        return {GroupKey(step, round, place): id for place, id in enumerate(prompt_ids)}

    def _replayed(
        self, keys: Mapping[GroupKey, int], facts: Mapping[str, Any]
    ) -> list[GroupRecord] | None:
        """Return a round from the journal, or None if it has to be sampled."""
        try:
            records = [self.journal.read(key, self.prompts.asked) for key in keys]
        except DataError:
            # The prompts may be gone, because a run without a checkpoint can start again with other
            # prompts.
            records = []
        whole = [record for record in records if record is not None]
        if not whole and records:
            return None
        if [record.group.prompt.prompt_id for record in whole] != list(keys.values()) or any(
            {name: record.facts.get(name) for name in facts} != facts for record in whole
        ):
            log.warning(
                "the journal's groups of step %d are damaged, or of other settings, prompts, "
                "reward files or model weights: sampled anew",
                next(iter(keys)).step,
            )
            return None
        return whole

    def _facts(self) -> dict[str, Any]:
        """Return the facts that a journalled group must share with a newly sampled group."""
        assert self.sampler is not None, "sampling needs an engine"
        return {"policy_version": self.sampler.policy_version, "origin": self.origin}

    def _sampled(
        self, keys: Mapping[GroupKey, int], found: StepRollouts, tell: Tell
    ) -> list[GroupRecord]:
        """Sample and score a round, and keep it in the journal."""
        assert self.sampler is not None, "sampling needs an engine"
        facts = self._facts()
        started = time.perf_counter()
        pending = sample_and_score(
            [Draw(str(key), self.prompts.asked(prompt_id)) for key, prompt_id in keys.items()],
            sampler=self.sampler,
            scorer=self.scorer,
            sampling=self.sampling,
            num_samples=self.rollout.samples_per_prompt,
            deadline_s=self.rollout.deadline_s,
            step=next(iter(keys)).step,
            progress=lambda done, total: tell("sampling", done, total),
            router_replay=self.moe.router_replay,
            kept_ids=self.sampling.is_cut,
        )
        found.generate_s += time.perf_counter() - started
        return self._scored(keys, pending, facts, found, tell)

    def _scored(
        self,
        keys: Mapping[GroupKey, int],
        pending: Sequence[PendingGroup],
        facts: Mapping[str, Any],
        found: StepRollouts,
        tell: Tell,
    ) -> list[GroupRecord]:
        """Wait for the rewards of a sampled round, and keep it in the journal."""
        facts = {**facts, "sampled_with": self.sampled_with}
        started = time.perf_counter()
        records: list[GroupRecord] = []
        verdicts: list[PendingVerdicts] = []
        for key, one in zip(keys, pending, strict=True):
            tell("scoring", len(records), len(keys))
            group, logged = one.result()
            records.append(GroupRecord(key, group, {**facts, "logged": logged}))
            if self.judges is not None:
                verdicts.append(self.judges.begin(group, step=key.step))
        records = with_verdicts(records, verdicts)
        found.reward_s += time.perf_counter() - started
        for record in records:
            self.journal.append(record)
        self.journal.barrier()
        return records


def with_verdicts(
    records: list[GroupRecord], pending: Sequence[PendingVerdicts]
) -> list[GroupRecord]:
    """Wait for the verdicts of users' filters on the groups of a round, and store them with each
    group.
    """
    if not pending:
        return records
    return [
        replace(record, facts={**record.facts, "verdicts": one.result()})
        for record, one in zip(records, pending, strict=True)
    ]


def verdicts_of(record: GroupRecord) -> Verdicts:
    """Return the verdicts of users' filters on a group."""
    return record.facts.get("verdicts", {})


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
    kept_ids: bool = False,
) -> list[PendingGroup]:
    """Sample groups, and start scoring each as soon as its samples are finished.

    Returns the groups in the order of drawing when all are sampled; some may still be being scored.
    """
    sampled = sampler.sample(
        draws,
        sampling=sampling,
        num_samples=num_samples,
        deadline_s=deadline_s,
        progress=progress,
        router_replay=router_replay,
        kept_ids=kept_ids,
    )
    pending = {
        place: scorer.begin(draws[place].prompt, completions, step=step, evaluates=evaluates)
        for place, completions in sampled
    }
    return [pending[place] for place in range(len(draws))]


def training_sampling(
    rollout: RolloutConfig, tokenizer: ChatTokenizer, *, is_strided: bool = False
) -> Sampling:
    """Return the sampling parameters of rollouts that are trained on.

    A continuation of a text (`is_strided`) ends only at its fixed length.
    """
    stops = frozenset() if is_strided else tokenizer.stop_ids | frozenset(rollout.stop_token_ids)
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_ids=stops,
        stop_strings=rollout.stop,
    )
