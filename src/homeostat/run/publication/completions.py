"""What was sampled, shown to people and kept for them to read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from homeostat.config.run import RunConfig
from homeostat.observe.completions import completion_steps, completions_file, write_completions
from homeostat.rollout.collect import StepRollouts
from homeostat.run.learning.learn import Learned
from homeostat.run.session.session import Session
from homeostat.types import RolloutGroup

log = logging.getLogger(__name__)


def keep_completions(
    config: RunConfig, session: Session, rollouts: StepRollouts, learned: Learned, *, step: int
) -> None:
    """A table that cannot be written ends no run: what counts is in the journal."""
    groups = rollouts.all_groups
    means = iter(float(a.mean()) if len(a) else 0.0 for a in learned.advantages_S)
    advantages = [[next(means, None) for _ in group.samples] for group in groups]
    session.recorder.samples(step, _shown(groups, advantages))
    rules = config.observe.completions
    if step % rules.interval_steps:
        return
    try:
        write_completions(
            session.run_dir.completions,
            step,
            groups,
            advantages=advantages,
            max_rows=rules.max_per_step,
        )
    except OSError as error:
        log.error("the completions of step %d were not written: %s", step, error)


def drop_completions_after(folder: Path, step: int) -> None:
    """What a run shows as its newest is not from a step that it has yet to come to."""
    for later in [found for found in completion_steps(folder) if found > step]:
        try:
            completions_file(folder, later).unlink(missing_ok=True)
        except OSError as error:
            log.warning("the old completions of step %d cannot be removed: %s", later, error)


def _shown(
    groups: list[RolloutGroup], advantages: list[list[float | None]]
) -> list[dict[str, Any]]:
    """The completions as a view shows them; of a chat, the last message is what was asked."""
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
