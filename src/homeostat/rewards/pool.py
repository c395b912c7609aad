"""Rewards in worker processes, with a time limit for every call.

    UnscoredGroup ... -> score() -> ScoredGroup ...      troubles -> on_trouble

A group is the unit of work: an idle worker takes the next one and answers reward by reward. A call
that hangs, or that ends its worker, costs that reward's values for that group and nothing else: the
worker is replaced and the group's other rewards are computed by the next one. Groups come back in
the order in which they were given.

A worker that was killed (SIGKILL: by a person, or by the system for want of memory) says nothing
about the call that it was busy with: the call is made again by another worker, so that a kill
changes no reward. Where that worker is killed too, `MAX_KILLED_TRIES` times in all, the call is
taken for the cause.

Any call may run into its limit, so a step waits for rewards at most `timeout_s` per call. A reward
that always hangs is still called each time: only its author knows whether a run without it means
anything. Its troubles say for how many calls in a row it has hung.
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

# Workers that end without having been asked anything, in a row, before that is an error. All that
# there are may be lost at one moment, which counts as one.
MAX_FAILED_STARTS = 5
# Workers that may be killed over the same call.
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
    # Workers that were killed over the call that comes next.
    num_kills: int = 0


class RewardPool:
    """`config.workers` processes that compute `config.functions`. To be used in a with statement.

    One thread at a time. `on_trouble` is called by `score`, as soon as a trouble is known. What
    rewards print goes to `log_file`, or nowhere.
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
        # What each worker is busy with; None while it loads or idles.
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
        idle = [worker for worker, job in self._workers.items() if job is None and worker.is_loaded]
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.close(patience_s=CLOSE_SECONDS if worker in idle else 0.0)
        self._workers.clear()

    def score(
        self, groups: Sequence[UnscoredGroup], *, step: int, total_steps: int
    ) -> list[ScoredGroup]:
        """The values that every reward gives to every sample, group by group."""
        assert self._workers, "a RewardPool has workers inside its with statement only"
        state = TrainerState(global_step=step, max_steps=total_steps)
        jobs = [self._job(group, state) for group in groups]
        waiting = deque(job for job in jobs if job.labels)
        while waiting or any(self._workers.values()):
            self._turn(waiting)
        self._tell_of_the_log()
        return [job.scored for job in jobs]

    def _tell_of_the_log(self) -> None:
        """Say once that functions print more than is kept."""
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
        """Hand out work, wait for something to happen, and deal with it."""
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
        """A worker ended in a call: the call is made again, or has failed."""
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
        """The call that was under way has no values; the job goes on with the next reward."""
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
        # Where the call failed as a whole, no single sample is known to be at fault.
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
        """A new worker for one that is lost; what is left of its job comes first."""
        job = self._workers.pop(worker)
        worker.close()
        if job is not None and job.labels:
            waiting.appendleft(job)
        self._start_worker()

    def _replace_unasked(self, worker: WorkerProcess, what: str) -> None:
        """It is lost, and no reward's call can be blamed: that must not go on for ever."""
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
    """A prompt to be read by people."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)


def _wait_for(workers: list[WorkerProcess]) -> list[WorkerProcess]:
    """Those that have something to say; none when the first deadline passes before."""
    wait_s = max(0.0, min(worker.deadline for worker in workers) - time.monotonic())
    by_number = {worker.channel.fileno(): worker for worker in workers}
    # poll, unlike select, also works where a process has many files open.
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
