"""The rollouts of one step: prompts -> completions -> rewards -> journal.

A step samples in rounds. Each round is one submission to the engine, and goes to the journal when
it is scored, before anything is trained on it. A run that is begun again finds the rounds it had
finished there and samples only the next one, from its start, so that the engine sees what it would
have seen: what comes out is the same to the bit.

With dynamic sampling a step has further rounds, until enough groups have samples that differ in
reward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from homeostat.algorithms.baselines import has_signal
from homeostat.config.run import RunConfig
from homeostat.data.prompts import PromptSampler, PromptSet
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.observe.names import describe
from homeostat.rewards.combine import RunningMoments, finish
from homeostat.rewards.groups import ScoredGroup, UnscoredGroup
from homeostat.rewards.pool import RewardPool
from homeostat.rollout.engine import Engine, Request, Sampling, generate
from homeostat.rollout.journal import Journal
from homeostat.rollout.sampled_with import require_same_sampling, sampled_with
from homeostat.types import Completion, Prompt, RolloutGroup, Sample

# Says what a step is at, for people who watch: (text, done, total).
Tell = Callable[[str, int, int], None]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepRollouts:
    """What a step sampled. `groups` are to be trained on; `passed_over` had nothing to teach."""

    groups: list[RolloutGroup] = field(default_factory=list)
    passed_over: list[RolloutGroup] = field(default_factory=list)
    num_rounds: int = 0
    num_replayed: int = 0
    generate_s: float = 0.0
    reward_s: float = 0.0
    # Sum and number of what functions handed to log_metric, by the metric's name.
    logged: dict[str, list[float]] = field(default_factory=dict)

    @property
    def all_groups(self) -> list[RolloutGroup]:
        return [*self.groups, *self.passed_over]

    def take_facts(self, facts: Mapping[str, Any]) -> None:
        """Add what the rewards of a round logged, whether it was sampled now or long ago."""
        for name, (total, count) in facts.get("logged", {}).items():
            if describe(name) is None:
                # Journals of earlier versions hold names that no function may log any more.
                log.warning("the logged metric %r is left out: its name cannot be used", name)
                continue
            before = self.logged.get(name, [0.0, 0])
            self.logged[name] = [before[0] + total, before[1] + count]


class Collector:
    """Gathers the groups of a step from the engine, or from a journal."""

    def __init__(
        self,
        config: RunConfig,
        *,
        prompts: PromptSet,
        sampler: PromptSampler,
        tokenizer: ChatTokenizer,
        engine: Engine | None,
        rewards: RewardPool,
        moments: RunningMoments,
        journal: Journal,
        origin: str,
        saved: Journal | None = None,
    ) -> None:
        """`origin` names all that rollouts come from: the journal's count where it is the same.
        `saved`: take the rollouts of another run from its journal, sample none."""
        self.config = config
        self.prompts = prompts
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.engine = engine
        self.rewards = rewards
        self.moments = moments
        self.journal = journal
        self.origin = origin
        self.saved = saved
        self.sampling = training_sampling(config, tokenizer)
        self.sampled_with = sampled_with(self.sampling, tokenizer)

    def collect(self, step: int, *, version: int, total_steps: int, tell: Tell) -> StepRollouts:
        wanted = self.config.rollout.prompts_per_step
        dynamic = self.config.algorithm.dynamic_sampling
        found = StepRollouts()
        while len(found.groups) < wanted:
            if self.saved is not None:
                groups = self._saved_round(step, found)
                if groups is None:
                    break
            else:
                ids = self.sampler.take(wanted - len(found.groups))
                groups = self._round(step, found, ids, version, total_steps, tell)
            found.num_rounds += 1
            if dynamic is None:
                found.groups += groups
                continue
            for group in groups:
                rewards_G = np.array([sample.reward for sample in group.samples], dtype=float)
                (found.groups if has_signal(rewards_G) else found.passed_over).append(group)
            if found.num_rounds == dynamic.max_rounds:
                break
        return found

    def _round(
        self,
        step: int,
        found: StepRollouts,
        prompt_ids: list[int],
        version: int,
        total_steps: int,
        tell: Tell,
    ) -> list[RolloutGroup]:
        number = found.num_rounds
        facts = {"policy_version": version, "origin": self.origin, "prompt_ids": prompt_ids}
        stored = self._from_journal(step, number, facts)
        if stored is not None:
            groups, told = stored
            found.num_replayed += 1
        else:
            prompts = [self.prompts[prompt_id] for prompt_id in prompt_ids]
            started = time.perf_counter()
            completions = self._sample(step, number, prompts, tell)
            found.generate_s += time.perf_counter() - started
            tell("scoring", 0, len(prompts))
            started = time.perf_counter()
            groups, told = self.score(prompts, completions, step=step, total_steps=total_steps)
            found.reward_s += time.perf_counter() - started
            kept = {**facts, "sampled_with": self.sampled_with, **told}
            self.journal.write(step, number, groups, kept)
        found.take_facts(told)
        return self._with_sums(groups)

    def _saved_round(self, step: int, found: StepRollouts) -> list[RolloutGroup] | None:
        assert self.saved is not None, "debug.rollouts names a journal"
        stored = self.saved.read(step, found.num_rounds, self.prompts.__getitem__)
        if stored is None and found.num_rounds == 0:
            steps = self.saved.steps()
            has = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
            raise DataError(
                f"debug.rollouts: {self.saved.folder} holds {has}, and not step {step}. Set "
                "trainer.max_steps to what is there."
            )
        if stored is None:
            return None
        groups, facts = stored
        folder = self.saved.folder
        require_same_sampling(facts.get("sampled_with"), self.sampled_with, folder=folder)
        self._require_rewards(groups)
        self.sampler.take(len(groups))
        found.num_replayed += 1
        found.take_facts(facts)
        return self._with_sums(groups)

    def _require_rewards(self, groups: Sequence[RolloutGroup]) -> None:
        """Saved rollouts have the values of the rewards of then, and of no others."""
        assert self.saved is not None, "debug.rollouts names a journal"
        stored = groups[0].samples[0].rewards
        unknown = [label for label in self.rewards.labels if label not in stored]
        if unknown:
            raise DataError(
                f"debug.rollouts: the rollouts in {self.saved.folder} have no values of the reward "
                f"{unknown[0]!r} (they have: {', '.join(stored)}), and none is computed anew. Name "
                "those in rewards.functions; their weights may be others."
            )

    def _from_journal(
        self, step: int, number: int, facts: dict[str, Any]
    ) -> tuple[list[RolloutGroup], dict[str, Any]] | None:
        try:
            found = self.journal.read(step, number, self.prompts.__getitem__)
        except DataError:
            # Of prompts that are no more: a run without a checkpoint may begin again with others.
            found = [], {}
        if found is None:
            return None
        groups, stored = found
        if {name: stored.get(name) for name in facts} != facts:
            log.warning(
                "the journal's round %d of step %d is of other settings, prompts, reward files or "
                "model weights: sampled anew",
                number,
                step,
            )
            return None
        return groups, stored

    def _sample(
        self, step: int, number: int, prompts: Sequence[Prompt], tell: Tell
    ) -> list[list[Completion]]:
        assert self.engine is not None, "sampling needs an engine"
        rollout = self.config.rollout
        requests = [
            Request(
                id=f"train/{step}/{number}/{group}/{sample}",
                tokens_T=prompt.tokens_T,
                sampling=self.sampling,
                seed=self.config.seed,
                session_key=f"train/{step}/{number}/{group}",
                deadline_s=rollout.deadline_s,
            )
            for group, prompt in enumerate(prompts)
            for sample in range(rollout.samples_per_prompt)
        ]
        return in_groups(
            generate(
                self.engine,
                requests,
                timeout_s=self.config.engine.stall_s,
                progress=lambda done, total: tell("sampling", done, total),
            ),
            rollout.samples_per_prompt,
        )

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Completion]],
        *,
        step: int,
        total_steps: int,
    ) -> tuple[list[RolloutGroup], dict[str, Any]]:
        """Groups with every reward's values, their sums still to be taken, and what the rewards
        logged: see StepRollouts.take_facts."""
        texts = [[self._text(completion) for completion in group] for group in completions]
        unscored = [
            UnscoredGroup(prompt, texts_G, [completion.tokens_T.tolist() for completion in group])
            for prompt, texts_G, group in zip(prompts, texts, completions, strict=True)
        ]
        scored = self.rewards.score(unscored, step=step, total_steps=total_steps)
        groups = []
        for request, group, answer in zip(unscored, completions, scored, strict=True):
            samples = [
                Sample(
                    completion,
                    request.texts[index],
                    {name: values[index] for name, values in answer.values.items()},
                    None,
                    {name: cells[index] for name, cells in answer.extras.items()},
                    answer.failed_on(index),
                )
                for index, completion in enumerate(group)
            ]
            groups.append(RolloutGroup(request.prompt, tuple(samples)))
        return groups, {"logged": _logged(scored)}

    def _text(self, completion: Completion) -> str:
        special = self.tokenizer.is_special
        return self.tokenizer.decode([t for t in completion.tokens_T.tolist() if not special(t)])

    def _with_sums(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """The rewards as trained on: weighted, normalised by the run so far, clipped."""
        assert self.config.rewards is not None, "combinations asks for rewards"
        labels = [reward.label for reward in self.config.rewards.functions]
        scored = [_scored(group, labels) for group in groups]
        sums = finish(scored, self.config.rewards, self.moments)
        return [
            replace(
                group,
                samples=tuple(
                    replace(sample, reward=reward)
                    for sample, reward in zip(group.samples, rewards_G, strict=True)
                ),
            )
            for group, rewards_G in zip(groups, sums, strict=True)
        ]


def _logged(scored: Sequence[ScoredGroup]) -> dict[str, list[float]]:
    """Sum and number of what functions handed to log_metric, by its name in the metrics."""
    values: dict[str, list[float]] = {}
    for group in scored:
        for name, logged in group.metrics.items():
            label, _, own = name.partition("/")
            values.setdefault(f"rewards/{label}/logged/{own}", []).extend(logged)
    return {name: [float(sum(found)), len(found)] for name, found in values.items() if found}


def _scored(group: RolloutGroup, labels: Sequence[str]) -> ScoredGroup:
    samples = group.samples
    return ScoredGroup(
        {label: [sample.rewards[label] for sample in samples] for label in labels},
        {
            label: frozenset(n for n, sample in enumerate(samples) if label in sample.failed)
            for label in labels
        },
    )


def training_sampling(config: RunConfig, tokenizer: ChatTokenizer) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        stop_ids=tokenizer.stop_ids | frozenset(rollout.stop_token_ids),
        stop_strings=rollout.stop,
    )


def in_groups(completions: list[Completion], size: int) -> list[list[Completion]]:
    return [completions[start : start + size] for start in range(0, len(completions), size)]
