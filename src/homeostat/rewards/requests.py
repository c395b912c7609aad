"""Requests to a worker: some rewards, for the samples of one group or of several."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from homeostat.rewards.answers import CallAnswer, CallProblem
from homeostat.rewards.calls import Call
from homeostat.rewards.groups import ScoredGroup, UnscoredGroup
from homeostat.rewards.problems import RewardProblem


@dataclass(slots=True)
class Job:
    """A group, and what came of its rewards. `done` is set when none is lacking any more."""

    group: UnscoredGroup
    call: Call
    scored: ScoredGroup
    problems: list[RewardProblem] = field(default_factory=list)
    done: Future[None] = field(default_factory=Future)


@dataclass(slots=True)
class Request:
    """Jobs that are computed together, and the rewards that they still lack."""

    jobs: list[Job]
    labels: deque[str]
    # Workers that were killed over the call that comes next.
    num_kills: int = 0
    is_begun: bool = False

    @property
    def calls(self) -> list[Call]:
        return [job.call for job in self.jobs]

    @property
    def num_samples(self) -> int:
        return sum(len(job.group.texts) for job in self.jobs)

    def take_label(self) -> str:
        """Return the reward that was computed, and let the next one be the current one."""
        self.num_kills = 0
        self.is_begun = True
        return self.labels.popleft()

    def close_if_done(self) -> bool:
        """Let go of whoever waits for the jobs, once no reward is lacking."""
        if self.labels:
            return False
        for job in self.jobs:
            job.done.set_result(None)
        return True


def gather(waiting: deque[Request], *, several: bool) -> Request:
    """Take the next request; with `several`, all waiting ones for the same rewards in one."""
    request = waiting.popleft()
    while several and waiting and _can_join(request) and _can_join(waiting[0]):
        if waiting[0].labels != request.labels:
            break
        request.jobs += waiting.popleft().jobs
    return request


def _can_join(request: Request) -> bool:
    # A call that a worker died of is made again as it was.
    return not request.is_begun and request.num_kills == 0


def share_out(answer: CallAnswer, jobs: list[Job]) -> list[CallAnswer]:
    """Split the answer for all samples into those of the jobs.

    What was logged with log_metric belongs to the call as a whole, and goes to the first job.
    """
    parts, start = [], 0
    for job in jobs:
        end = start + len(job.group.texts)
        parts.append(
            CallAnswer(
                values=answer.values[start:end],
                problems=tuple(_within(answer.problems, start, end)),
                metrics={} if parts else answer.metrics,
                extras={name: cells[start:end] for name, cells in answer.extras.items()},
            )
        )
        start = end
    return parts


def _within(problems: tuple[CallProblem, ...], start: int, end: int) -> list[CallProblem]:
    """Return the problems of the samples between two places, which become 0, 1 ..."""
    found = []
    for one in problems:
        samples = tuple(sample - start for sample in one.samples if start <= sample < end)
        if samples:
            found.append(CallProblem(one.kind, one.message, samples, one.traceback))
    return found
