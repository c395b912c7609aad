"""Run jobs in parallel, each in its own process with one thread and a deadline.

A patient may be killed, hang or run out of memory: that is its purpose. It leaves behind its run
directory and `output.log`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from homeostat.clinic.job import Job
from homeostat.errors import OutputError
from homeostat.observe.durable import not_written

# Seconds that a process gets to end itself before it is killed.
PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a run. `exit_code` is None if its deadline ended it."""

    job: Job
    exit_code: int | None
    seconds: float

    @property
    def how(self) -> str:
        if self.exit_code is None:
            return "deadline"
        return "finished" if self.exit_code == 0 else f"exit {self.exit_code}"


def run_all(
    jobs: Sequence[Job], *, at_a_time: int, tell: Callable[[Ended], None]
) -> dict[Job, Ended]:
    """Run all jobs. `tell` is called for each run that ended, by any thread.

    Whatever ends this early, such as Ctrl-C, ends the runs, too.
    """
    running: set[subprocess.Popen[bytes]] = set()

    def one(job: Job) -> Ended:
        ended = run_one(job, running=running)
        tell(ended)
        return ended

    pool = ThreadPoolExecutor(at_a_time)
    try:
        return {ended.job: ended for ended in pool.map(one, jobs)}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            _signal(process, signal.SIGKILL)
        pool.shutdown()


def run_one(job: Job, *, running: set[subprocess.Popen[bytes]] | None = None) -> Ended:
    """Run one job. `running` holds the process while it runs."""
    running = set() if running is None else running
    folder = Path(job.folder)
    # Remove an earlier run, which would be resumed otherwise.
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    with _log_in(folder) as output:
        process = _start(job, output)
        running.add(process)
        code = _wait(process, job.deadline_s)
        running.discard(process)
    return Ended(job, code, round(time.perf_counter() - started, 2))


def _log_in(folder: Path) -> BinaryIO:
    """Open the log of a job in a new folder. Raises OutputError."""
    try:
        folder.mkdir(parents=True)
        return open(folder / "output.log", "wb")
    except OSError as error:
        raise OutputError(not_written(folder, error)) from None


def _start(job: Job, output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "homeostat.clinic.patient", job.to_json()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        # Its own process group, so that everything it started ends with it.
        start_new_session=True,
    )


def _wait(process: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGTERM)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait()
    return None


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
