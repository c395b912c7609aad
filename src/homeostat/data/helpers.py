"""Processes that compute parts of a list, and answer in its order.

    tasks -> dealt to the processes in turn -> results in the order of the tasks

Each process has its own pipe. The processes of a ProcessPoolExecutor share one: if one of them
is killed (by the kernel, for lack of memory) while it writes its answer, the others wait for a lock
that nobody holds any more, and the parent for the rest of the answer. Here the parent reads the end
of that pipe.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

# Use spawn: the parent may have threads and a GPU, which a forked child must not inherit.
_CONTEXT = multiprocessing.get_context("spawn")
# Tasks that a process has been given and not yet answered. They are small, so that dealing them
# never waits for a process that itself waits for its answer to be read.
IN_FLIGHT = 3
_END_SECONDS = 5.0
# A task is a chunk of rows, which takes seconds.
ANSWER_SECONDS = 900.0


class HelperDiedError(Exception):
    """A process ended without an answer."""


class HelperHungError(Exception):
    """A process that lives gave no answer within ANSWER_SECONDS."""


def computed(
    work: Callable[[Task], Result], tasks: Iterable[Task], *, num_processes: int
) -> Iterator[Result]:
    """Yield work(task) for each task, in order; `work` is sent to each process once.

    What `work` raises is raised here. Raises HelperDiedError if a process is killed, and
    HelperHungError if one gives no answer. No process is left when the iterator ends or is closed.
    """
    helpers = [_Helper(work) for _ in range(num_processes)]
    try:
        waiting: deque[_Helper] = deque()
        for number, task in enumerate(tasks):
            helper = helpers[number % num_processes]
            helper.give(task)
            waiting.append(helper)
            if len(waiting) >= IN_FLIGHT * num_processes:
                yield waiting.popleft().answer()
        while waiting:
            yield waiting.popleft().answer()
    finally:
        for helper in helpers:
            helper.end()


class _Helper:
    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        _limit_reads(self._pipe, ANSWER_SECONDS)
        self._process: SpawnProcess = _CONTEXT.Process(target=_serve, args=(theirs, work))
        self._process.start()
        # The pipe must end with the process, so nobody else may hold that side of it.
        theirs.close()

    def give(self, task: Any) -> None:
        try:
            self._pipe.send(task)
        except OSError:
            raise HelperDiedError from None

    def answer(self) -> Any:
        try:
            is_error, value = self._pipe.recv()
        except BlockingIOError:
            raise HelperHungError from None
        except (EOFError, OSError):
            raise HelperDiedError from None
        if is_error:
            raise value
        return value

    def end(self) -> None:
        self._pipe.close()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _limit_reads(pipe: Connection, seconds: float) -> None:
    """Let reads fail with BlockingIOError after a time limit, even in the middle of a message."""
    limit = struct.pack("ll", *divmod(round(seconds * 1e6), 1_000_000))
    with socket.socket(fileno=os.dup(pipe.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    # Ctrl-C reaches the whole process group, but only the parent should react.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer = False, work(task)
        except Exception as error:  # It belongs to the parent, whatever it is.
            answer = True, error
        try:
            pipe.send(answer)
        except OSError:
            # The parent does not wait for this answer any more.
            return


def _end_with_parent() -> None:
    """End with the parent: if it is killed, a long piece of work would continue for nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a helper calls this"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
