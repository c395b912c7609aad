"""Show sampled completions in the view, and save some of them in tables for the user to read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from homeostat.config.observe import CompletionsConfig
from homeostat.observe.completions import completion_steps, completions_file, write_completions
from homeostat.rollout.collect import StepRollouts
from homeostat.run.learning.learn import Learned
from homeostat.run.session.session import Session
from homeostat.run.session.step import Group
from homeostat.types import RolloutGroup

log = logging.getLogger(__name__)


def keep_completions(
    config: CompletionsConfig,
    session: Session,
    rollouts: StepRollouts,
    learned: Learned,
    *,
    step: int,
) -> None:
    """Show the completions of a step, and write a table of them when one is due.

    A table that cannot be written is only logged: the journal holds all that training needs.
    """
    groups, advantages = rollouts.all_groups, _advantages(rollouts, learned)
    per_token = iter(learned.logp_differences_ST)
    differences = [[next(per_token, None) for _ in group.samples] for group in groups]
    session.recorder.samples(step, _shown(groups, advantages))
    if step % config.interval_steps:
        return
    try:
        write_completions(
            session.run_dir.completions,
            step,
            groups,
            advantages=advantages,
            logp_differences=differences,
            max_rows=config.max_per_step,
        )
    except OSError as error:
        log.error("the completions of step %d were not written: %s", step, error)


def groups_of(rollouts: StepRollouts, learned: Learned) -> tuple[Group, ...]:
    """Return the groups of a step for the code that called the run; filtered ones come last."""
    return tuple(
        Group(
            prompt=group.prompt.prompt,
            columns=group.prompt.columns,
            completions=tuple(sample.text for sample in group.samples),
            rewards=tuple(sample.reward for sample in group.samples),
            rewards_by_name=tuple(sample.rewards for sample in group.samples),
            advantages=tuple(advantages_G),
            token_ids=tuple(sample.completion.tokens_T for sample in group.samples),
            stop_reasons=tuple(str(sample.completion.stop_reason) for sample in group.samples),
        )
        for group, advantages_G in zip(
            rollouts.all_groups, _advantages(rollouts, learned), strict=True
        )
    )


def _advantages(rollouts: StepRollouts, learned: Learned) -> list[list[float | None]]:
    """Return the mean advantage of each sample; None for groups that are not trained on."""
    means = iter(float(a.mean()) if len(a) else 0.0 for a in learned.advantages_S)
    return [[next(means, None) for _ in group.samples] for group in rollouts.all_groups]


def drop_completions_after(folder: Path, step: int) -> None:
    """Remove tables of steps that a resumed run will sample again, so that none is out of date."""
    for later in [found for found in completion_steps(folder) if found > step]:
        try:
            completions_file(folder, later).unlink(missing_ok=True)
        except OSError as error:
            log.warning("the old completions of step %d cannot be removed: %s", later, error)


def _shown(
    groups: list[RolloutGroup], advantages: list[list[float | None]]
) -> list[dict[str, Any]]:
    """Return the completions as a view shows them. The prompt of a chat is its last message."""
    rows = []
    for group, advantages_G in zip(groups, advantages, strict=True):
        prompt = group.prompt.prompt
        text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
        rows += [
            {
                "prompt": text,
                "completion": sample.text,
                "reward": sample.reward,
                "advantage": advantage,
                "stop_reason": str(sample.completion.stop_reason),
            }
            for sample, advantage in zip(group.samples, advantages_G, strict=True)
        ]
    return rows
