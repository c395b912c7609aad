"""Check which rows and prompts a run gets: the mix of its sources, its curriculum, its filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from homeostat.config.algorithm import PolicyGradientConfig
from homeostat.config.curriculum import CurriculumConfig, FunctionFilter
from homeostat.config.rewards import RewardsConfig
from homeostat.config.run import RunConfig
from homeostat.data.inputs import RowSet
from homeostat.data.mixing import source_parts
from homeostat.data.prompts import PromptSet
from homeostat.data.store import RowStore
from homeostat.errors import MissingDependencyError, RewardError
from homeostat.rewards.pool import RewardPool
from homeostat.rewards.problems import RewardProblem
from homeostat.rollout.filters import FilterFunctions, FilterJudges, GroupFilters, SolvedBy
from homeostat.run.preflight.item import Item
from homeostat.types import Completion, Prompt, RolloutGroup, Sample, Segment, StopReason

# A source whose rows come this many times as often as those of the others is worth a warning.
MANY_EPOCHS = 20.0
# Groups on which every function of rollout.filters is tried.
NUM_TRIED = 2


def mix_items(config: RunConfig, train: RowSet[RowStore] | RowSet[PromptSet]) -> Iterator[Item]:
    """Show the share of every source, and how often its rows come."""
    if len(config.data.train) < 2:
        return
    per_step = config.rows_per_step
    total = config.trainer.total_steps(len(train), rows_per_step=per_step)
    parts = source_parts(config.data, train.sources, total_steps=total, rows_per_step=per_step)
    text = "; ".join(map(str, parts))
    often = [part.name for part in parts if part.epochs > MANY_EPOCHS]
    if config.data.is_mixed and often:
        text += f". The rows of {often[0]} come very often: lower its weight, or add rows"
    level = "warning" if config.data.is_mixed and often else "ok"
    yield Item("mix", level, text, {"sources": [asdict(part) for part in parts]})


def filter_items(config: RunConfig, prompts: PromptSet) -> Iterator[Item]:
    """Show curriculum and filters, and try the filters that are users' functions."""
    assert isinstance(config.algorithm, PolicyGradientConfig), "RL has an algorithm of RL"
    rollout, rewards = config.rollout, config.reward_functions
    solved_by = SolvedBy.of(rollout, rewards)
    if rollout.curriculum is not None and solved_by is not None:
        yield _curriculum_item(rollout.curriculum, solved_by)
    filters = GroupFilters(rollout, dynamic=config.algorithm.dynamic_sampling, solved_by=solved_by)
    if not filters.filters:
        return
    names = [getattr(one, "label", one.type) for one in filters.filters]
    text = (
        f"a step samples up to {filters.max_rounds} rounds, until {rollout.prompts_per_step} "
        f"groups pass: {', '.join(names)}"
    )
    yield Item("filters", "ok", text, {"filters": names, "max_rounds": filters.max_rounds})
    tried = [prompts[index] for index in range(min(NUM_TRIED, len(prompts)))]
    for one in filters.functions:
        yield _tried(one, rewards, tried, num_samples=rollout.samples_per_prompt)


def _curriculum_item(curriculum: CurriculumConfig, solved_by: SolvedBy) -> Item:
    parts = []
    if (difficulty := curriculum.difficulty) is not None:
        how = f"prompts are drawn by their solve rate ({difficulty.prefer.type})"
        parts.append(f"{how}, {difficulty.explore:.0%} of the draws regardless of it")
    if (replay := curriculum.replay) is not None:
        parts.append(f"up to {replay.share:.0%} of a step are {replay.of} prompts, drawn again")
    names = " and ".join(solved_by.labels)
    text = f"{'; '.join(parts)}; a sample is solved where {names} gives {solved_by.at:g} or more"
    return Item("curriculum", "ok", text, {"solved_by": list(solved_by.labels), "at": solved_by.at})


def _tried(
    one: FunctionFilter, rewards: RewardsConfig, prompts: Sequence[Prompt], *, num_samples: int
) -> Item:
    """Call a filter as the run does, on groups that are all solved, all failed, and half solved."""
    problems: list[RewardProblem] = []
    settings = FilterFunctions((one,), rewards.timeout_s)
    labels = [reward.label for reward in rewards.trained]
    solved = ([1] * num_samples, [0] * num_samples, [n % 2 for n in range(num_samples)])
    groups = [_group(prompt, labels, values) for prompt in prompts for values in solved]
    try:
        with RewardPool(settings, on_problem=problems.append, noun="filter") as pool:
            judges = FilterJudges(pool, rewards, total_steps=1)
            pending = [judges.begin(group, step=0) for group in groups]
            verdicts = [found.result()[one.label] for found in pending]
    except (RewardError, MissingDependencyError) as error:
        return Item("filters", "error", str(error))
    if problems:
        first = problems[0]
        return Item(
            "filters",
            "error",
            f"{one.label}: it failed on {len(problems)} of {len(groups)} trial groups: "
            f"{first.message}\n{first.traceback_tail}".rstrip(),
            {"failed": len(problems)},
        )
    reasons = Counter(reason or one.default_reason for keep, reason in verdicts if not keep)
    kept = sum(bool(keep) for keep, _ in verdicts)
    why = ", ".join(f"{count} for {reason}" for reason, count in reasons.items())
    text = f"{one.label}: kept {kept} of {len(groups)} trial groups" + (f"; {why}" if why else "")
    return Item("filters", "ok", text, {"kept": kept, "dropped": dict(reasons)})


def _group(prompt: Prompt, labels: Sequence[str], values: Sequence[float]) -> RolloutGroup:
    samples = []
    for value in values:
        segment = Segment(np.array([0]), np.zeros(1, dtype=np.float32), policy_version=0)
        completion = Completion("trial", (segment,), StopReason.STOP)
        rewards = {label: float(value) for label in labels}
        samples.append(Sample(completion, "", rewards, float(value)))
    return RolloutGroup(prompt, tuple(samples))
