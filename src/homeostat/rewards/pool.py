"""Rewards in worker processes, started for each group as soon as it is given.

    submit(UnscoredGroup) -> PendingScore ... -> result() -> ScoredGroup      problems -> on_problem

Rewards are computed by crews (rewards/crews.py): the functions share worker processes, and each
reward that asks a model has its own process. Every crew has a lane: a thread that hands groups
to its idle workers (rewards/workers.py) and takes in their answers, so that rewards are computed
while the caller continues, for instance to sample other groups.

Invariants: a group's result does not depend on what else is being scored, except that a classifier
scores the groups that are submitted together in one batch. `result` reports a group's problems when
it is called: whoever asks for results in the order of drawing gets values and problems in that
order, whichever came first. Which worker scores a group, and after which others, is not defined: a
reward must depend on its arguments alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from homeostat.config.model_rewards import JudgeReward
from homeostat.config.reward_base import Reward
from homeostat.observe.timeline import OnSpan
from homeostat.rewards.calls import Call, TrainerState
from homeostat.rewards.crews import PoolConfig, crews_of
from homeostat.rewards.groups import ScoredGroup, UnscoredGroup
from homeostat.rewards.lanes import Lane
from homeostat.rewards.log_limit import MAX_BYTES, was_trimmed
from homeostat.rewards.problems import RewardProblem
from homeostat.rewards.requests import Job, Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingScore:
    """A group that is being scored: one job in each lane that has a reward for it."""

    labels: tuple[str, ...]
    jobs: tuple[tuple[Lane, Job], ...]
    tell: Callable[[list[RewardProblem]], None]

    def result(self) -> ScoredGroup:
        """Wait for the last reward, at most its time limit for each call, and report problems.

        Raises RewardError where no reward can be computed any more.
        """
        for lane, _ in self.jobs:
            lane.release()
        for lane, job in self.jobs:
            wait((job.done, lane.thread), return_when=FIRST_COMPLETED)
            if not job.done.done():
                # The thread ends before its time by an error alone.
                lane.thread.result()
            job.done.result()
            self.tell(job.problems)
        return _joined(self.labels, [job.scored for _, job in self.jobs])


class RewardPool:
    """Scores groups in worker processes. To be used in a with statement.

    `on_problem` is called by `PendingScore.result`, in its caller's thread. What rewards print goes
    to `log_file`, or nowhere. Judges keep their answers in the folder `cache`, or nowhere.
    `on_span` is called after each call of a worker, in the thread of its lane.
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        on_problem: Callable[[RewardProblem], None],
        log_file: Path | None = None,
        cache: Path | None = None,
        noun: str = "reward",
        on_span: OnSpan | None = None,
    ) -> None:
        self.labels = [reward.label for reward in config.functions]
        self.judges = {one.label for one in config.functions if isinstance(one, JudgeReward)}
        self.on_problem = on_problem
        self.log_file = log_file
        self.noun = noun
        self._trained = [one.label for one in config.functions if not _is_gold(one)]
        self._lanes = [
            Lane(crew, log_file=log_file, cache=cache, noun=noun, on_span=on_span)
            for crew in crews_of(config)
        ]
        self._opened = ExitStack()
        self._told_of_the_log = False

    def __enter__(self) -> RewardPool:
        with ExitStack() as stack:
            for lane in self._lanes:
                stack.enter_context(lane)
            self._opened = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End threads and processes; what is still being scored is given up. Idempotent."""
        self._opened.close()

    def submit(
        self, group: UnscoredGroup, *, step: int, total_steps: int, evaluates: bool = False
    ) -> PendingScore:
        """Have the rewards computed for every sample of a group.

        Those of role eval are computed only where the group `evaluates`.
        """
        prompt, state = group.prompt, TrainerState(global_step=step, max_steps=total_steps)
        call = Call(prompt.prompt, group.texts, group.completion_ids, dict(prompt.columns), state)
        return self.submit_call(group, call, evaluates=evaluates)

    def submit_call(
        self, group: UnscoredGroup, call: Call, *, evaluates: bool = False
    ) -> PendingScore:
        """Have the functions of the pool called for a group, with the arguments of `call`."""
        labels = self.labels if evaluates else self._trained
        jobs = []
        for lane in self._lanes:
            own = deque(label for label in lane.labels if label in labels)
            job = Job(group, call, ScoredGroup())
            if own and group.texts:
                lane.submit(Request([job], own))
                jobs.append((lane, job))
        return PendingScore(tuple(labels), tuple(jobs), self._tell)

    def score(
        self,
        groups: Sequence[UnscoredGroup],
        *,
        step: int,
        total_steps: int,
        evaluates: bool = False,
    ) -> list[ScoredGroup]:
        """Submit all groups, and wait for all of them."""
        pending = [
            self.submit(group, step=step, total_steps=total_steps, evaluates=evaluates)
            for group in groups
        ]
        return [one.result() for one in pending]

    def _tell(self, problems: list[RewardProblem]) -> None:
        for problem in problems:
            self.on_problem(problem)
        if self.log_file is None or self._told_of_the_log or not was_trimmed(self.log_file):
            return
        self._told_of_the_log = True
        log.warning(
            "%s functions have printed more than %d MB: %s keeps the beginning and the newest "
            "lines",
            self.noun,
            MAX_BYTES // 2**20,
            self.log_file,
        )


def _is_gold(one: object) -> bool:
    return isinstance(one, Reward) and one.role == "eval"


def _joined(labels: Sequence[str], parts: Sequence[ScoredGroup]) -> ScoredGroup:
    """Return the values of all lanes, in the order of the recipe."""
    joined = ScoredGroup()
    values = {label: found for part in parts for label, found in part.values.items()}
    joined.values.update({label: values.get(label, []) for label in labels})
    for part in parts:
        joined.failed.update(part.failed)
        joined.metrics.update(part.metrics)
        joined.extras.update(part.extras)
    return joined
