"""What was sampled, kept for people to read."""

from __future__ import annotations

import logging

from homeostat.config.run import RunConfig
from homeostat.observe.completions import write_completions
from homeostat.rollout.collect import StepRollouts
from homeostat.run.learn import Learned
from homeostat.run.session import Session

log = logging.getLogger(__name__)


def keep_completions(
    config: RunConfig, session: Session, rollouts: StepRollouts, learned: Learned, *, step: int
) -> None:
    """A table that cannot be written ends no run: what counts is in the journal."""
    rules = config.observe.completions
    if step % rules.interval_steps:
        return
    means = iter(float(a.mean()) if len(a) else 0.0 for a in learned.advantages_S)
    advantages = [[next(means, 0.0) for _ in group.samples] for group in rollouts.all_groups]
    try:
        write_completions(
            session.run_dir.completions,
            step,
            rollouts.all_groups,
            advantages=advantages,
            max_rows=rules.max_per_step,
        )
    except OSError as error:
        log.error("the completions of step %d were not written: %s", step, error)
