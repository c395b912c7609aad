"""The process that runs rewards. Stdlib only until a reward needs more, so that it starts fast.

There are two processes in their own session:

    guardian   runs no foreign code; ends the worker and everything it started when the parent is
               gone, even by kill -9, and what is left of it when the worker ends (see reaping.py);
               keeps rewards.log within its limits
    worker     loads the rewards, then answers one request after another

The guardian's stdin is a pipe to which the parent writes only to request a traceback: when it
closes, the parent has ended. The worker may hang in C code while holding the GIL, and can still be
killed. Both ignore SIGINT, SIGTERM, SIGHUP and SIGUSR1, because the parent decides when work ends.

The environment is passed on unchanged, including secrets: a reward that calls a judge over the
network needs its key, and whoever writes a reward runs code as the user anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from homeostat.errors import MissingDependencyError
from homeostat.rewards.calls import Call, answer_call, describe, tail_of
from homeostat.rewards.frames import FrameReader, receive_frame, send_frame
from homeostat.rewards.functions import RewardFunction, load_reward
from homeostat.rewards.log_limit import trim
from homeostat.rewards.reaping import MARKER, adopt_orphans, end_descendants, end_marked

# Seconds between checks of the size of rewards.log.
LOG_SECONDS = 0.25
_LEFT_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main(channel_fd: int, dump_fd: int, log_file: str | None) -> None:
    """Fork into guardian and worker, and run each of them."""
    adopt_orphans()
    for number in _LEFT_TO_THE_PARENT:
        # Use a handler, not SIG_IGN, which programs that a reward starts would inherit.
        signal.signal(number, _leave_to_the_parent)
    worker = os.fork()
    if worker:
        os.close(channel_fd)
        _guard(worker, log_file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(dump_fd, False)
    faulthandler.enable(dump_fd)
    faulthandler.register(signal.SIGUSR1, dump_fd, all_threads=False)
    with socket.socket(fileno=channel_fd) as channel:
        channel.set_inheritable(False)
        os.register_at_fork(after_in_child=lambda: _let_go(channel))
        _serve(channel)


def _leave_to_the_parent(number: int, frame: FrameType | None) -> None:
    pass


def _let_go(channel: socket.socket) -> None:
    """Release a process that a reward forks: it cannot answer, and can be terminated."""
    channel.close()
    for number in _LEFT_TO_THE_PARENT:
        signal.signal(number, signal.SIG_DFL)


def _guard(worker: int, log_file: str | None) -> NoReturn:
    is_over = threading.Event()
    threading.Thread(target=_follow_the_parent, args=(worker, is_over), daemon=True).start()
    if log_file is not None:
        threading.Thread(target=_bound_the_log, args=(Path(log_file),), daemon=True).start()
    ended = status = 0
    while ended != worker:
        # This also reaps the orphans that we adopted.
        ended, status = os.waitpid(-1, 0)
    is_over.set()
    code = os.waitstatus_to_exitcode(status)
    _end_the_rest()
    os._exit(code if code >= 0 else 128 - code)


def _follow_the_parent(worker: int, is_over: threading.Event) -> None:
    while os.read(0, 1):
        # It may have ended in the meantime.
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGUSR1)
    if not is_over.is_set():
        # Otherwise the main thread is about to report how the worker ended, and must not be killed.
        _end_the_rest()
        os.killpg(0, signal.SIGKILL)


def _end_the_rest() -> None:
    end_descendants(os.getpid())
    if marker := os.environ.get(MARKER):
        end_marked(marker)


def _bound_the_log(file: Path) -> NoReturn:
    while True:
        time.sleep(LOG_SECONDS)
        trim(file)


def _serve(channel: socket.socket) -> None:
    reader = FrameReader()
    first = receive_frame(channel, reader)
    if first is None:
        return
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    setup: list[dict[str, Any]] = pickle.loads(first)
    rewards = {one["label"]: _load(one) for one in setup}
    options = {one["label"]: one["options"] for one in setup}
    _send(channel, {"failed": _failures(rewards)})
    with asyncio.Runner() as runner:
        while (frame := receive_frame(channel, reader)) is not None:
            labels, calls = pickle.loads(frame)
            assert all(isinstance(call, Call) for call in calls), f"a request holds {calls!r}"
            for label in labels:
                reward = rewards[label]
                answer = answer_call(reward, calls, options=options[label], runner=runner)
                _send(channel, asdict(answer))


def _load(setup: dict[str, Any]) -> RewardFunction | BaseException:
    """Load the rewards; one that does not load becomes one that raises, and the others work."""
    try:
        return load_reward(setup["type"], setup["settings"])
    except BaseException as error:
        return error


def _failures(rewards: dict[str, RewardFunction | BaseException]) -> list[dict[str, Any]]:
    return [
        {
            "label": label,
            "message": describe(reward),
            "missing": isinstance(reward, MissingDependencyError),
            "traceback": tail_of(reward),
        }
        for label, reward in rewards.items()
        if isinstance(reward, BaseException)
    ]


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    send_frame(channel, json.dumps(message).encode("ascii"))
