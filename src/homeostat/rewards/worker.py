"""The process that runs rewards. Stdlib only until a reward asks for more, so that it starts fast.

Two processes in a session of their own:

    guardian   runs no foreign code; ends the worker and all that it started when the parent is
               gone, even by kill -9, and what is left of it when the worker ends (see reaping.py);
               keeps rewards.log within its bounds
    worker     loads the rewards, then answers one group after another

The guardian's stdin is a pipe that the parent never writes to but to ask for a traceback: its end
is the parent's end. The worker may hang in C code with the GIL held, and is then killed none the
less. Both leave SIGINT, SIGTERM and SIGHUP to the parent, which decides when work ends.

The environment is left as it is, secrets too: a reward that asks a judge over the network needs its
key. Whoever writes a reward runs code as the user anyway.
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

# From one look at the size of rewards.log to the next.
LOG_SECONDS = 0.25
_LEFT_TO_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(channel_fd: int, dump_fd: int, log_file: str | None) -> None:
    adopt_orphans()
    for number in _LEFT_TO_THE_PARENT:
        # A handler, not SIG_IGN: programs that a reward starts would inherit that.
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
    """A process that a reward forks is no worker: it cannot answer, and can be terminated."""
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
        # Orphans that came to us are waited for on the way.
        ended, status = os.waitpid(-1, 0)
    is_over.set()
    code = os.waitstatus_to_exitcode(status)
    _end_the_rest()
    os._exit(code if code >= 0 else 128 - code)


def _follow_the_parent(worker: int, is_over: threading.Event) -> None:
    while os.read(0, 1):
        # It may have ended while it was asked where it is.
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGUSR1)
    if not is_over.is_set():
        # Otherwise the main thread is about to say how the worker ended, and must not be killed.
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
            labels, call = pickle.loads(frame)
            assert isinstance(call, Call), f"a request holds a {type(call)}"
            for label in labels:
                reward = rewards[label]
                answer = answer_call(reward, call, options=options[label], runner=runner)
                _send(channel, asdict(answer))


def _load(setup: dict[str, Any]) -> RewardFunction | BaseException:
    """A reward that does not load is one that raises: the others go on."""
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
