"""The processes of a crew: each takes a request, and answers reward by reward.

    start() -> turn(waiting) ... -> close()

A call that hangs, or that ends its worker, costs that reward's values for that request and nothing
else: the worker is replaced and the other rewards are computed by the next one.

A worker that was killed (SIGKILL: by a person, or by the system for lack of memory), or that was
stopped when its time was over (SIGSTOP), says nothing about the call that it was busy with: the
call is made again by another worker, so that a kill changes no reward. Where that worker is killed
too, `MAX_KILLED_TRIES` times in all, the call is taken for the cause.

Any call may run into its time limit (`Crew.limit_s`). A reward that always hangs is still called
each time: only its author knows whether a run without it means anything. Its problems say for how
many calls in a row it has hung.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from homeostat.config.curriculum import FunctionFilter
from homeostat.config.model_rewards import ClassifierReward, JudgeReward
from homeostat.config.reward_base import RewardPlugin
from homeostat.config.rewards import AnyReward
from homeostat.errors import MissingDependencyError, RewardError
from homeostat.observe.redact import mask_text
from homeostat.observe.timeline import OnSpan
from homeostat.rewards.answers import (
    BadAnswerError,
    CallAnswer,
    CallProblem,
    LoadFailure,
    read_answer,
    read_load_failures,
)
from homeostat.rewards.crews import Crew
from homeostat.rewards.problems import ProblemKind, RewardProblem, shorten
from homeostat.rewards.process import Setup, WorkerGoneError, WorkerProcess
from homeostat.rewards.requests import Job, Request, gather, share_out

# Workers that end without having been asked anything, in a row, before that is an error. All that
# there are may be lost at one moment, which counts as one.
MAX_FAILED_STARTS = 5
# Workers that may be killed over the same call.
MAX_KILLED_TRIES = 3
CLOSE_SECONDS = 1.0

log = logging.getLogger(__name__)


class RewardWorkers:
    """`crew.num_workers` processes that compute `crew.rewards`. One thread at a time."""

    def __init__(
        self,
        crew: Crew,
        *,
        log_file: Path | None,
        cache: Path | None = None,
        noun: str = "reward",
        on_span: OnSpan | None = None,
    ) -> None:
        """`noun` is what messages call the functions. `on_span` gets each call."""
        self._on_span = on_span
        self.crew = crew
        self.noun = noun
        rewards = [_described(reward, cache) for reward in crew.rewards]
        self._setup = Setup(rewards, folder=Path.cwd(), log_file=log_file, load_s=crew.load_s)
        # What each worker is busy with; None while it loads or idles.
        self._workers: dict[WorkerProcess, Request | None] = {}
        self._streaks: Counter[str] = Counter()
        self._failed_starts = 0

    @property
    def is_busy(self) -> bool:
        return any(one is not None for one in self._workers.values())

    def start(self) -> None:
        """Start the processes and wait until all have loaded the rewards. Raises RewardError, or
        MissingDependencyError, where a reward does not load."""
        for _ in range(self.crew.num_workers):
            self._start_worker()
        while not all(worker.is_loaded for worker in self._workers):
            self.turn(deque(), refuse=True)
        self._failed_starts = 0

    def close(self) -> None:
        """End the processes. Idempotent."""
        idle = [worker for worker, one in self._workers.items() if one is None and worker.is_loaded]
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.close(patience_s=CLOSE_SECONDS if worker in idle else 0.0)
        self._workers.clear()

    def turn(
        self, waiting: deque[Request], *, wake: socket.socket | None = None, refuse: bool = False
    ) -> None:
        """Hand out work, wait until a worker answers, a limit passes or `wake` can be read,
        and then deal with what happened."""
        for worker in [worker for worker, one in self._workers.items() if one is None]:
            if waiting and worker.is_loaded:
                self._hand_out(worker, waiting)
        awaited = [w for w, one in self._workers.items() if one is not None or not w.is_loaded]
        if not awaited:
            return
        speaking = _wait_for(awaited, wake)
        for worker in speaking:
            self._listen(worker, waiting, refuse=refuse)
        now = time.monotonic()
        for worker in awaited:
            if worker not in speaking and worker.deadline <= now:
                self._give_up(worker, waiting)

    def _hand_out(self, worker: WorkerProcess, waiting: deque[Request]) -> None:
        request = gather(waiting, several=self.crew.gathers != "group")
        try:
            limit_s = self.crew.limit_s(request.num_samples)
            worker.ask(request.labels, request.calls, timeout_s=limit_s)
            self._workers[worker] = request
        except WorkerGoneError as gone:
            waiting.appendleft(request)
            self._replace_unasked(worker, str(gone))

    def _listen(self, worker: WorkerProcess, waiting: deque[Request], *, refuse: bool) -> None:
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
            request = self._workers[worker]
            if request is None:
                self._replace_unasked(worker, str(gone))
            else:
                self._lose(worker, request, str(gone))
                self._replace(worker, waiting)

    def _lose(self, worker: WorkerProcess, request: Request, how: str) -> None:
        """A worker ended in a call: the call is made again, or has failed."""
        if worker.was_killed and self._tries_again(request, how):
            return
        self._streaks[request.labels[0]] = 0
        self._fail(request, ProblemKind.WORKER_DIED, how, where=worker.where())

    def _tries_again(self, request: Request, how: str) -> bool:
        """Count a worker that was lost from outside; False if the call is taken for the cause."""
        request.num_kills += 1
        if request.num_kills >= MAX_KILLED_TRIES:
            return False
        log.warning("%s %s: %s. The call is made again.", self.noun, request.labels[0], how)
        return True

    def _give_up(self, worker: WorkerProcess, waiting: deque[Request]) -> None:
        request = self._workers[worker]
        if request is None and worker.is_stopped:
            self._replace_unasked(worker, "the worker process was stopped by a signal")
            return
        if request is None:
            limit_s, where = self._setup.load_limit_s, worker.where()
            raise RewardError(f"{self.noun}s do not load within {limit_s:.0f} s. Now at:\n{where}")
        limit_s, given_s = self.crew.limit_s(request.num_samples), self.crew.timeout_s
        limit = f"no answer within {self.crew.setting} = {given_s:g} s"
        if limit_s != given_s:
            limit = f"no answer within {limit_s:g} s (see {self.crew.setting})"
        if worker.is_stopped and self._tries_again(request, f"{limit}: it was stopped by a signal"):
            self._replace(worker, waiting)
            return
        self._streaks[request.labels[0]] += 1
        self._fail(request, ProblemKind.TIMEOUT, limit, where=worker.where())
        self._replace(worker, waiting)

    def _take_answer(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        request = self._workers[worker]
        if request is None:
            raise WorkerGoneError("the worker answered without having been asked")
        try:
            answer = read_answer(message, num=request.num_samples)
        except BadAnswerError as error:
            raise WorkerGoneError(f"the worker's answer makes no sense: {error}") from error
        worker.deadline = time.monotonic() + self.crew.limit_s(request.num_samples)
        self._failed_starts = 0
        label = request.take_label()
        if self._on_span is not None:
            row = f"{self.noun} worker {worker.pid}"
            self._on_span(row, label, began=worker.asked_at, ended=time.monotonic())
        worker.asked_at = time.monotonic()
        self._streaks[label] = 0
        for job, part in zip(request.jobs, share_out(answer, request.jobs), strict=True):
            self._note(job, label, part)
        if request.close_if_done():
            self._workers[worker] = None

    def _note(self, job: Job, label: str, answer: CallAnswer) -> None:
        """Keep the answer for one job."""
        job.scored.values[label] = answer.values
        job.scored.failed[label] = answer.failed
        for name, values in answer.metrics.items():
            job.scored.metrics[f"{label}/{name}"] = values
        for name, cells in answer.extras.items():
            job.scored.extras[f"{label}/{name}"] = cells
        for problem in answer.problems:
            self._report(job, label, problem)

    def _fail(self, request: Request, kind: ProblemKind, message: str, *, where: str) -> None:
        """Record that the current call has no values; the next reward is computed then."""
        label = request.take_label()
        for job in request.jobs:
            num = len(job.group.texts)
            samples = tuple(range(num))
            job.scored.values[label] = [None] * num
            job.scored.failed[label] = frozenset(samples)
            self._report(job, label, CallProblem(kind, message, samples, where))
        request.close_if_done()

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

    def _replace(self, worker: WorkerProcess, waiting: deque[Request]) -> None:
        """A new worker for one that is lost; what is left of its request comes first."""
        request = self._workers.pop(worker)
        worker.close()
        if request is not None and request.labels:
            waiting.appendleft(request)
        self._start_worker()

    def _replace_unasked(self, worker: WorkerProcess, what: str) -> None:
        """Replace a worker that was lost without a call to blame, a limited number of times."""
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS * self.crew.num_workers:
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


# Settings that the worker does not need.
_NOT_SENT = {"name", "weight", "type", "role", "timeout_s", "load_timeout_s"}


def _described(reward: AnyReward | FunctionFilter, cache: Path | None) -> dict[str, Any]:
    if isinstance(reward, RewardPlugin):
        # All of its keys are its own, whatever their names are.
        own = reward.model_dump(exclude={"type"})
        return {"label": reward.label, "type": reward.type, "settings": own, "options": {}}
    settings = reward.model_dump(exclude=_NOT_SENT)
    options = settings.pop("options", {})
    if isinstance(reward, ClassifierReward):
        # Normalising needs the moments of the run, which the trainer's process keeps.
        del settings["normalise"]
    if isinstance(reward, JudgeReward):
        keeps = settings.pop("cache") and cache is not None
        settings["cache_file"] = str(cache / f"{reward.label}.jsonl") if keeps else None
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
