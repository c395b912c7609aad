"""Records what goes wrong in rewards and users' filters as events; it never ends the run."""

from __future__ import annotations

import logging
from collections import Counter

from homeostat.rewards.problems import RewardProblem
from homeostat.run.session.session import Session

# Number of problems of one kind and reward that are written to the events.
MAX_EVENTS = 20

log = logging.getLogger(__name__)


class ProblemLog:
    """Turns the problems of rewards and filters into events of the step at hand."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.step = session.start_step
        self._told: Counter[tuple[str, str, str]] = Counter()

    def take(self, problem: RewardProblem) -> None:
        if self._is_new("reward", problem):
            if problem.kind.is_error:
                log.warning("%s", problem)
            self.session.event(
                "reward_trouble",
                self.step,
                reward=problem.reward,
                failure=str(problem.kind),
                message=problem.message,
                num_samples=problem.num_samples,
                prompt_id=problem.prompt_id,
                prompt=problem.prompt,
                completion=problem.completion,
                traceback=problem.traceback_tail,
                calls_in_a_row=problem.streak,
            )

    def take_filter(self, problem: RewardProblem) -> None:
        """Record that a user's filter failed on a group, which is therefore dropped."""
        if self._is_new("filter", problem):
            log.warning("filter %s, row %d: %s", problem.reward, problem.prompt_id, problem.message)
            self.session.event(
                "filter_failed",
                self.step,
                filter=problem.reward,
                failure=str(problem.kind),
                message=problem.message,
                prompt_id=problem.prompt_id,
                prompt=problem.prompt,
                traceback=problem.traceback_tail,
                calls_in_a_row=problem.streak,
            )

    def _is_new(self, noun: str, problem: RewardProblem) -> bool:
        """Count a problem; False once there were enough of its kind."""
        key = (noun, problem.reward, problem.kind)
        self._told[key] += 1
        return self._told[key] <= MAX_EVENTS
