"""The processes of a RewardPool: each takes a group, and answers reward by reward.

    start() -> turn(waiting) ... -> close()

A call that hangs, or that ends its worker, costs that reward's values for that group and nothing
else: the worker is replaced and the group's other rewards are computed by the next one.

A worker that was killed (SIGKILL: by a person, or by the system for lack of memory) says nothing
about the call that it was busy with: the call is made again by another worker, so that a kill
changes no reward. Where that worker is killed too, `MAX_KILLED_TRIES` times in all, the call is
taken for the cause.

Any call may run into its limit of `timeout_s`. A reward that always hangs is still called each
time: only its author knows whether a run without it means anything. Its problems say for how many
calls in a row it has hung.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from homeostat.config.curriculum import FunctionFilter
from homeostat.config.rewards import AnyReward
from homeostat.errors import MissingDependencyError, RewardError
from homeostat.observe.redact import mask_text
from homeostat.rewards.answers import (
    BadAnswerError,
    CallProblem,
    LoadFailure,
    read_answer,
    read_load_failures,
)
from homeostat.rewards.calls import Call
from homeostat.rewards.groups import ScoredGroup, UnscoredGroup
from homeostat.rewards.problems import ProblemKind, RewardProblem, shorten
from homeostat.rewards.process import LOAD_SECONDS, Setup, WorkerGoneError, WorkerProcess

# Workers that end without having been asked anything, in a row, before that is an error. All that
# there are may be lost at one moment, which counts as one.
MAX_FAILED_STARTS = 5
# Workers that may be killed over the same call.
MAX_KILLED_TRIES = 3
CLOSE_SECONDS = 1.0

log = logging.getLogger(__name__)


class PoolConfig(Protocol):
    """The functions of a pool's workers: a RewardsConfig, or the filters of a recipe."""

    @property
    def functions(self) -> Sequence[AnyReward | FunctionFilter]: ...

    @property
    def workers(self) -> int: ...

    @property
    def timeout_s(self) -> float: ...


@dataclass(slots=True)
class Job:
    """A group, the rewards that it still lacks, and what came of the others.

    `done` is set when no reward is lacking; the other fields then change no more.
    """

    group: UnscoredGroup
    call: Call
    labels: deque[str]
    scored: ScoredGroup
    problems: list[RewardProblem] = field(default_factory=list)
    done: Future[None] = field(default_factory=Future)
    # Workers that were killed over the call that comes next.
    num_kills: int = 0


class RewardWorkers:
    """`config.workers` processes that compute `config.functions`. One thread at a time."""

    def __init__(self, config: PoolConfig, *, log_file: Path | None, noun: str = "reward") -> None:
        """`noun` is what messages call the functions."""
        self.config = config
        self.noun = noun
        rewards = [_described(reward) for reward in config.functions]
        self._setup = Setup(rewards, folder=Path.cwd(), log_file=log_file)
        # What each worker is busy with; None while it loads or idles.
        self._workers: dict[WorkerProcess, Job | None] = {}
        self._streaks: Counter[str] = Counter()
        self._failed_starts = 0

    @property
    def is_busy(self) -> bool:
        return any(job is not None for job in self._workers.values())

    def start(self) -> None:
        """Start the processes and wait until all have loaded the rewards. Raises RewardError, or
        MissingDependencyError, where a reward does not load."""
        for _ in range(self.config.workers):
            self._start_worker()
        while not all(worker.is_loaded for worker in self._workers):
            self.turn(deque(), refuse=True)
        self._failed_starts = 0

    def close(self) -> None:
        """End the processes. Idempotent."""
        idle = [worker for worker, job in self._workers.items() if job is None and worker.is_loaded]
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.close(patience_s=CLOSE_SECONDS if worker in idle else 0.0)
        self._workers.clear()

    def turn(
        self, waiting: deque[Job], *, wake: socket.socket | None = None, refuse: bool = False
    ) -> None:
        """Hand out work, wait until a worker answers, a limit passes or `wake` can be read,
        and then deal with what happened."""
        for worker in [worker for worker, job in self._workers.items() if job is None]:
            if waiting and worker.is_loaded:
                self._hand_out(worker, waiting)
        awaited = [w for w, job in self._workers.items() if job is not None or not w.is_loaded]
        if not awaited:
            return
        speaking = _wait_for(awaited, wake)
        for worker in speaking:
            self._listen(worker, waiting, refuse=refuse)
        now = time.monotonic()
        for worker in awaited:
            if worker not in speaking and worker.deadline <= now:
                self._give_up(worker, waiting)

    def _hand_out(self, worker: WorkerProcess, waiting: deque[Job]) -> None:
        job = waiting.popleft()
        try:
            worker.ask(job.labels, job.call, timeout_s=self.config.timeout_s)
            self._workers[worker] = job
        except WorkerGoneError as gone:
            waiting.appendleft(job)
            self._replace_unasked(worker, str(gone))

    def _listen(self, worker: WorkerProcess, waiting: deque[Job], *, refuse: bool) -> None:
        try:
            for message in worker.hear():
                if worker.is_loaded:
                    self._take_answer(worker, message)
                else:
                    worker.is_loaded = True
                    failures = _load_failures(message)
                    if refuse and failures:
                        raise _refusal(failures, self.noun)
        except WorkerGoneError as gone:
            job = self._workers[worker]
            if job is None:
                self._replace_unasked(worker, str(gone))
            else:
                self._lose(worker, job, str(gone))
                self._replace(worker, waiting)

    def _lose(self, worker: WorkerProcess, job: Job, how: str) -> None:
        """A worker ended in a call: the call is made again, or has failed."""
        job.num_kills += 1
        if worker.was_killed and job.num_kills < MAX_KILLED_TRIES:
            log.warning("%s %s: %s. The call is made again.", self.noun, job.labels[0], how)
            return
        self._streaks[job.labels[0]] = 0
        self._fail(job, ProblemKind.WORKER_DIED, how, where=worker.where())

    def _give_up(self, worker: WorkerProcess, waiting: deque[Job]) -> None:
        job = self._workers[worker]
        if job is None:
            where = worker.where()
            raise RewardError(
                f"{self.noun}s do not load within {LOAD_SECONDS:.0f} s. Now at:\n{where}"
            )
        limit = f"no answer within rewards.timeout_s = {self.config.timeout_s:g} s"
        self._streaks[job.labels[0]] += 1
        self._fail(job, ProblemKind.TIMEOUT, limit, where=worker.where())
        self._replace(worker, waiting)

    def _take_answer(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        job = self._workers[worker]
        if job is None:
            raise WorkerGoneError("the worker answered without having been asked")
        try:
            answer = read_answer(message, num=len(job.group.texts))
        except BadAnswerError as error:
            raise WorkerGoneError(f"the worker's answer makes no sense: {error}") from error
        worker.deadline = time.monotonic() + self.config.timeout_s
        self._failed_starts = 0
        label = job.labels.popleft()
        job.num_kills = 0
        self._streaks[label] = 0
        job.scored.values[label] = answer.values
        job.scored.failed[label] = answer.failed
        for name, values in answer.metrics.items():
            job.scored.metrics[f"{label}/{name}"] = values
        for name, cells in answer.extras.items():
            job.scored.extras[f"{label}/{name}"] = cells
        for problem in answer.problems:
            self._report(job, label, problem)
        if not job.labels:
            self._workers[worker] = None
            job.done.set_result(None)

    def _fail(self, job: Job, kind: ProblemKind, message: str, *, where: str) -> None:
        """Record that the current call has no values; the job continues with the next reward."""
        label = job.labels.popleft()
        job.num_kills = 0
        num = len(job.group.texts)
        samples = tuple(range(num))
        job.scored.values[label] = [None] * num
        job.scored.failed[label] = frozenset(samples)
        self._report(job, label, CallProblem(kind, message, samples, where))
        if not job.labels:
            job.done.set_result(None)

    def _report(self, job: Job, label: str, problem: CallProblem) -> None:
        kind, samples = problem.kind, problem.samples
        texts = job.group.texts
        # Where the call failed as a whole, no single sample is known to be at fault.
        known = kind in _SAMPLES_KNOWN or len(texts) == 1 or len(samples) < len(texts)
        job.problems.append(
            RewardProblem(
                reward=label,
                kind=kind,
                message=mask_text(problem.message),
                prompt_id=job.group.prompt.prompt_id,
                prompt=shorten(text_of_prompt(job.group.prompt.prompt)),
                num_samples=len(samples),
                completion=shorten(texts[samples[0]]) if known else None,
                traceback_tail=mask_text(problem.traceback),
                streak=self._streaks[label],
            )
        )

    def _replace(self, worker: WorkerProcess, waiting: deque[Job]) -> None:
        """A new worker for one that is lost; what is left of its job comes first."""
        job = self._workers.pop(worker)
        worker.close()
        if job is not None and job.labels:
            waiting.appendleft(job)
        self._start_worker()

    def _replace_unasked(self, worker: WorkerProcess, what: str) -> None:
        """Replace a worker that was lost without a call to blame, a limited number of times."""
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS * self.config.workers:
            file = self._setup.log_file
            place = f" What it printed is in {file}." if file is not None else ""
            raise RewardError(f"{self.noun} workers do not stay alive: {what}.{place}")
        self._replace(worker, deque())

    def _start_worker(self) -> None:
        try:
            self._workers[WorkerProcess(self._setup)] = None
        except OSError as error:
            raise RewardError(f"a {self.noun} worker cannot be started: {error}") from error


_SAMPLES_KNOWN = {ProblemKind.NONE, ProblemKind.NOT_FINITE, ProblemKind.WRONG_TYPE}


def text_of_prompt(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt to be read by people."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)


def _wait_for(workers: list[WorkerProcess], wake: socket.socket | None) -> list[WorkerProcess]:
    """Those that have something to say; none when the first deadline passes before, or when `wake`
    can be read."""
    wait_s = max(0.0, min(worker.deadline for worker in workers) - time.monotonic())
    by_number = {worker.channel.fileno(): worker for worker in workers}
    # poll, unlike select, also works where a process has many files open.
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    if wake is not None:
        poll.register(wake, select.POLLIN)
    found = poll.poll(wait_s * 1000 + 1)
    return [by_number[number] for number, _ in found if number in by_number]


def _described(reward: AnyReward | FunctionFilter) -> dict[str, Any]:
    settings = reward.model_dump(exclude={"name", "weight", "type"})
    options = settings.pop("options", {})
    return {
        "label": reward.label, "type": reward.type, "settings": settings, "options": options
    }  # fmt: skip


def _load_failures(message: dict[str, Any]) -> list[LoadFailure]:
    try:
        return read_load_failures(message)
    except BadAnswerError as error:
        raise WorkerGoneError(f"the worker's first message makes no sense: {error}") from error


def _refusal(failed: list[LoadFailure], noun: str) -> RewardError | MissingDependencyError:
    if all(one.is_missing_package for one in failed):
        return MissingDependencyError("\n".join(one.message for one in failed))
    lines = [f"{noun} {one.label}: {one.message}\n{one.traceback}" for one in failed]
    return RewardError(mask_text("\n".join(line.rstrip() for line in lines)))
