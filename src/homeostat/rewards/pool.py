"""Compute rewards in worker processes, with a time limit for every call.

    UnscoredGroup ... -> score() -> ScoredGroup ...      failures -> on_trouble

A group is the unit of work: an idle worker takes the next one and answers reward by reward. A call
that hangs, or that ends its worker, costs only that reward's values for that group: the worker is
replaced, and the next one computes the group's other rewards. Groups are returned in the order in
which they were given.

If a worker was killed (SIGKILL: by a person, or by the system for lack of memory), the call that it
was busy with need not be the cause: another worker repeats the call, so a kill changes no reward.
If workers are killed over the same call `MAX_KILLED_TRIES` times, the call is taken for the cause.

Any call may reach its time limit, so a step waits for rewards at most `timeout_s` per call. A
reward that always hangs is still called each time: only its author knows whether a run without it
means anything. Its failures record for how many consecutive calls it has hung.
"""

from __future__ import annotations

import logging
import select
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from homeostat.config.rewards import AnyReward, RewardsConfig
from homeostat.errors import MissingDependencyError, RewardError
from homeostat.observe.redact import mask_text
from homeostat.rewards.answers import (
    BadAnswerError,
    CallProblem,
    LoadFailure,
    read_answer,
    read_load_failures,
)
from homeostat.rewards.calls import Call, TrainerState
from homeostat.rewards.groups import ScoredGroup, UnscoredGroup
from homeostat.rewards.log_limit import MAX_BYTES, was_trimmed
from homeostat.rewards.process import LOAD_SECONDS, Setup, WorkerGoneError, WorkerProcess
from homeostat.rewards.trouble import RewardTrouble, TroubleKind, shorten

# Number of workers in a row that may end without having been called before that is an error. All
# workers may be lost at the same moment, which counts once.
MAX_FAILED_STARTS = 5
# Number of workers that may be killed over the same call.
MAX_KILLED_TRIES = 3
CLOSE_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """A group, and the rewards that it still lacks."""

    group: UnscoredGroup
    call: Call
    labels: deque[str]
    scored: ScoredGroup
    # Number of workers that were killed over the next call.
    num_kills: int = 0


class RewardPool:
    """`config.workers` processes that compute `config.functions`. Use it in a with statement.

    It is not thread-safe. `score` calls `on_trouble` as soon as a failure is known. What rewards
    print goes to `log_file`, or nowhere.
    """

    def __init__(
        self,
        config: RewardsConfig,
        *,
        on_trouble: Callable[[RewardTrouble], None],
        log_file: Path | None = None,
    ) -> None:
        self.config = config
        self.on_trouble = on_trouble
        self.labels = [reward.label for reward in config.functions]
        rewards = [_described(reward) for reward in config.functions]
        self._setup = Setup(rewards, folder=Path.cwd(), log_file=log_file)
        # The job of each worker; None while it loads or is idle.
        self._workers: dict[WorkerProcess, _Job | None] = {}
        self._streaks: Counter[str] = Counter()
        self._failed_starts = 0
        self._told_of_the_log = False

    def __enter__(self) -> RewardPool:
        with ExitStack() as stack:
            stack.callback(self.close)
            for _ in range(self.config.workers):
                self._start_worker()
            while not all(worker.is_loaded for worker in self._workers):
                self._turn(deque(), refuse=True)
            stack.pop_all()
        self._failed_starts = 0
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; idle ones get time to run their exit handlers."""
        idle = [worker for worker, job in self._workers.items() if job is None and worker.is_loaded]
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.close(patience_s=CLOSE_SECONDS if worker in idle else 0.0)
        self._workers.clear()

    def score(
        self, groups: Sequence[UnscoredGroup], *, step: int, total_steps: int
    ) -> list[ScoredGroup]:
        """Return the values that every reward gives to every sample, group by group."""
        assert self._workers, "a RewardPool has workers inside its with statement only"
        state = TrainerState(global_step=step, max_steps=total_steps)
        jobs = [self._job(group, state) for group in groups]
        waiting = deque(job for job in jobs if job.labels)
        while waiting or any(self._workers.values()):
            self._turn(waiting)
        self._tell_of_the_log()
        return [job.scored for job in jobs]

    def _tell_of_the_log(self) -> None:
        """Log once that functions print more than is kept."""
        file = self._setup.log_file
        if file is None or self._told_of_the_log or not was_trimmed(file):
            return
        self._told_of_the_log = True
        log.warning(
            "reward functions have printed more than %d MB: %s keeps the beginning and the newest "
            "lines",
            MAX_BYTES // 2**20,
            file,
        )

    def _job(self, group: UnscoredGroup, state: TrainerState) -> _Job:
        prompt = group.prompt
        call = Call(prompt.prompt, group.texts, group.completion_ids, dict(prompt.columns), state)
        empty: dict[str, list[float | None]] = {label: [] for label in self.labels}
        return _Job(group, call, deque(self.labels if group.texts else ()), ScoredGroup(empty))

    def _turn(self, waiting: deque[_Job], *, refuse: bool = False) -> None:
        """Hand out work, wait for an event, and handle it."""
        for worker in [worker for worker, job in self._workers.items() if job is None]:
            if waiting and worker.is_loaded:
                self._hand_out(worker, waiting)
        awaited = [w for w, job in self._workers.items() if job is not None or not w.is_loaded]
        if not awaited:
            return
        speaking = _wait_for(awaited)
        for worker in speaking:
            self._listen(worker, waiting, refuse=refuse)
        now = time.monotonic()
        for worker in awaited:
            if worker not in speaking and worker.deadline <= now:
                self._give_up(worker, waiting)

    def _hand_out(self, worker: WorkerProcess, waiting: deque[_Job]) -> None:
        job = waiting.popleft()
        try:
            worker.ask(job.labels, job.call, timeout_s=self.config.timeout_s)
            self._workers[worker] = job
        except WorkerGoneError as gone:
            waiting.appendleft(job)
            self._replace_unasked(worker, str(gone))

    def _listen(self, worker: WorkerProcess, waiting: deque[_Job], *, refuse: bool) -> None:
        try:
            for message in worker.hear():
                if worker.is_loaded:
                    self._take_answer(worker, message)
                else:
                    worker.is_loaded = True
                    failures = _load_failures(message)
                    if refuse and failures:
                        raise _refusal(failures)
        except WorkerGoneError as gone:
            job = self._workers[worker]
            if job is None:
                self._replace_unasked(worker, str(gone))
            else:
                self._lose(worker, job, str(gone))
                self._replace(worker, waiting)

    def _lose(self, worker: WorkerProcess, job: _Job, how: str) -> None:
        """Handle a worker that ended during a call: repeat the call, or count it as failed."""
        job.num_kills += 1
        if worker.was_killed and job.num_kills < MAX_KILLED_TRIES:
            log.warning("reward %s: %s. The call is made again.", job.labels[0], how)
            return
        self._streaks[job.labels[0]] = 0
        self._fail(job, TroubleKind.WORKER_DIED, how, where=worker.where())

    def _give_up(self, worker: WorkerProcess, waiting: deque[_Job]) -> None:
        job = self._workers[worker]
        if job is None:
            where = worker.where()
            raise RewardError(f"rewards do not load within {LOAD_SECONDS:.0f} s. Now at:\n{where}")
        limit = f"no answer within rewards.timeout_s = {self.config.timeout_s:g} s"
        self._streaks[job.labels[0]] += 1
        self._fail(job, TroubleKind.TIMEOUT, limit, where=worker.where())
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
        if not job.labels:
            self._workers[worker] = None
        for problem in answer.problems:
            self._report(job, label, problem)

    def _fail(self, job: _Job, kind: TroubleKind, message: str, *, where: str) -> None:
        """Record that the current call has no values; the job continues with the next reward."""
        label = job.labels.popleft()
        job.num_kills = 0
        num = len(job.group.texts)
        samples = tuple(range(num))
        job.scored.values[label] = [None] * num
        job.scored.failed[label] = frozenset(samples)
        self._report(job, label, CallProblem(kind, message, samples, where))

    def _report(self, job: _Job, label: str, problem: CallProblem) -> None:
        kind, samples = problem.kind, problem.samples
        texts = job.group.texts
        # If the call failed as a whole, no single sample is known to be at fault.
        known = kind in _SAMPLES_KNOWN or len(texts) == 1 or len(samples) < len(texts)
        self.on_trouble(
            RewardTrouble(
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

    def _replace(self, worker: WorkerProcess, waiting: deque[_Job]) -> None:
        """Start a new worker for a lost one; the rest of its job comes first."""
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
            raise RewardError(f"reward workers do not stay alive: {what}.{place}")
        self._replace(worker, deque())

    def _start_worker(self) -> None:
        try:
            self._workers[WorkerProcess(self._setup)] = None
        except OSError as error:
            raise RewardError(f"a reward worker cannot be started: {error}") from error


_SAMPLES_KNOWN = {TroubleKind.NONE, TroubleKind.NOT_FINITE, TroubleKind.WRONG_TYPE}


def text_of_prompt(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as text for people."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)


def _wait_for(workers: list[WorkerProcess]) -> list[WorkerProcess]:
    """Return the workers that have something to say; none if the first deadline passes before."""
    wait_s = max(0.0, min(worker.deadline for worker in workers) - time.monotonic())
    by_number = {worker.channel.fileno(): worker for worker in workers}
    # Unlike select, poll also works if the process has many open files.
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(wait_s * 1000 + 1)]


def _described(reward: AnyReward) -> dict[str, Any]:
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


def _refusal(failed: list[LoadFailure]) -> RewardError | MissingDependencyError:
    if all(one.is_missing_package for one in failed):
        return MissingDependencyError("\n".join(one.message for one in failed))
    lines = [f"reward {one.label}: {one.message}\n{one.traceback}" for one in failed]
    return RewardError(mask_text("\n".join(line.rstrip() for line in lines)))
