"""Rewards in worker processes, started for each group as soon as it is given.

    submit(UnscoredGroup) -> PendingScore ... -> result() -> ScoredGroup      problems -> on_problem

A group is the unit of work: one call of every reward, by one worker. A thread hands groups to idle
workers (rewards/workers.py) and takes in their answers, so that rewards are computed while the
caller continues, for instance to sample other groups.

Invariants: a group's result does not depend on what else is being scored. `result` reports a
group's problems when it is called: whoever asks for results in the order of drawing gets values and
problems in that order, whichever came first. Which worker scores a group, and after which others,
is not defined: a reward must depend on its arguments alone.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from homeostat.rewards.calls import Call, TrainerState
from homeostat.rewards.groups import ScoredGroup, UnscoredGroup
from homeostat.rewards.log_limit import MAX_BYTES, was_trimmed
from homeostat.rewards.problems import RewardProblem
from homeostat.rewards.workers import Job, PoolConfig, RewardWorkers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingScore:
    """A group that is being scored."""

    job: Job
    thread: Future[None]
    tell: Callable[[list[RewardProblem]], None]

    def result(self) -> ScoredGroup:
        """Wait for the last reward, at most rewards.timeout_s for each call, and report problems.

        Raises RewardError where no reward can be computed any more.
        """
        wait((self.job.done, self.thread), return_when=FIRST_COMPLETED)
        if not self.job.done.done():
            # The thread ends before its time by an error alone.
            self.thread.result()
        self.job.done.result()
        self.tell(self.job.problems)
        return self.job.scored


class RewardPool:
    """Scores groups in `config.workers` processes. To be used in a with statement.

    `on_problem` is called by `PendingScore.result`, in its caller's thread. What rewards print goes
    to `log_file`, or nowhere.
    """

    def __init__(
        self,
        config: PoolConfig,
        *,
        on_problem: Callable[[RewardProblem], None],
        log_file: Path | None = None,
        noun: str = "reward",
    ) -> None:
        self.labels = [reward.label for reward in config.functions]
        self.on_problem = on_problem
        self.log_file = log_file
        self.noun = noun
        self._workers = RewardWorkers(config, log_file=log_file, noun=noun)
        self._opened = ExitStack()
        self._thread: Future[None] | None = None
        # Jobs that the thread has not taken yet. A byte sent into the bell wakes it.
        self._submitted: deque[Job] = deque()
        self._bell: socket.socket | None = None
        self._is_closing = False
        self._told_of_the_log = False

    def __enter__(self) -> RewardPool:
        with ExitStack() as stack:
            stack.callback(self._workers.close)
            if self.labels:
                self._workers.start()
            self._bell, wake = map(stack.enter_context, socket.socketpair())
            executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="rewards"))
            stack.callback(self._end_thread)
            self._thread = executor.submit(self._work, wake)
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
        """End the thread and the processes; what is still being scored is given up. Idempotent."""
        self._opened.close()

    def _end_thread(self) -> None:
        self._is_closing = True
        self._ring()

    def _ring(self) -> None:
        assert self._bell is not None, "a RewardPool has a thread inside its with statement only"
        # If the buffer is full, a byte that will wake the thread is already there. Waiting for room
        # would wait for ever if an error has ended the thread.
        with contextlib.suppress(BlockingIOError):
            self._bell.send(b"!", socket.MSG_DONTWAIT)

    def submit(self, group: UnscoredGroup, *, step: int, total_steps: int) -> PendingScore:
        """Have every reward computed for every sample of a group."""
        prompt, state = group.prompt, TrainerState(global_step=step, max_steps=total_steps)
        call = Call(prompt.prompt, group.texts, group.completion_ids, dict(prompt.columns), state)
        return self.submit_call(group, call)

    def submit_call(self, group: UnscoredGroup, call: Call) -> PendingScore:
        """Have every function of the pool called for a group, with the arguments of `call`."""
        assert self._thread is not None, "a RewardPool has workers inside its with statement only"
        empty: dict[str, list[float | None]] = {label: [] for label in self.labels}
        job = Job(group, call, deque(self.labels if group.texts else ()), ScoredGroup(empty))
        if job.labels:
            self._submitted.append(job)
            self._ring()
        else:
            job.done.set_result(None)
        return PendingScore(job, self._thread, self._tell)

    def score(
        self, groups: Sequence[UnscoredGroup], *, step: int, total_steps: int
    ) -> list[ScoredGroup]:
        """Submit all groups, and wait for all of them."""
        pending = [self.submit(group, step=step, total_steps=total_steps) for group in groups]
        return [one.result() for one in pending]

    def _work(self, wake: socket.socket) -> None:
        """Run by the thread: give work to the processes until the pool is closed."""
        waiting: deque[Job] = deque()
        while not self._is_closing:
            if waiting or self._workers.is_busy:
                self._workers.turn(waiting, wake=wake)
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096, socket.MSG_DONTWAIT)
            else:
                wake.recv(4096)
            while self._submitted:
                waiting.append(self._submitted.popleft())

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
