"""Find the first cause among the failures at the end of a log of several processes.

When one process fails, the others fail because of it: their collectives break, Ray reports a lost
actor, the launcher a failed child. These failures come later in time, but not always later in the
log, and each has its own traceback. All functions are pure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

from homeostat.health.failures.speakers import rank_of
from homeostat.health.failures.tracebacks import Traceback
from homeostat.health.log import Log

# Messages of a process that lost the connection to another one.
_AFTERMATH = (
    "connection reset by peer", "connection closed by", "broken pipe",
    "nccl communicator was abort",
    "watchdog", "remote process exited", "socket closed", "peer closed", "recvvalue failed",
    "process group has been aborted", "the actor is dead", "actor died", "actor is unavailable",
    "worker died", "workers died", "engine core proc", "enginedeaderror", "engine is dead",
    "engine loop is dead", "background loop has errored", "broken process pool", "failed to recv",
    "tcpstore", "store based barrier", "failed to get", "closing signal", "another worker",
    "one of the workers", "exited unexpectedly", "cancellederror", "was cancelled",
    "connection was forcibly closed", "collective operation timeout", "ncclremoteerror",
    "a remote process exited", "heartbeat", "subprocess failed", "child process",
)  # fmt: skip
_AFTERMATH_KINDS = ("DistBackendError", "DistNetworkError", "DistStoreError", "BrokenPipeError",
                    "ConnectionResetError", "EOFError", "CancelledError", "EngineDeadError",
                    "AsyncEngineDeadError", "ConnectionAbortedError", "SignalException",
                    "IncompleteReadError", "ConnectionRefusedError")  # fmt: skip
_ROOT = "Root Cause (first observed failure)"
_TABLE_LINES = 8
_ROOT_RANK = re.compile(r"\brank\s{0,8}: (\d{1,6})")


def first_failure(found: Sequence[Traceback], log: Log) -> Traceback:
    """Return the failure that caused the others."""
    told = [one for one in found if not one.is_report] or list(found)
    own = [one for one in told if not is_aftermath(one)] or told
    rank = root_rank(log)
    of_rank = [one for one in own if rank is not None and rank_of(one.speaker) == rank]
    first = (of_rank or own)[0]
    # Prefer a complete copy of a traceback to one that lacks its end.
    if not first.has_tail:
        whole = [one for one in own if one.has_tail]
        return whole[0] if whole else first
    return first


def is_aftermath(found: Traceback) -> bool:
    """Return whether an exception only reports that another process ended, or that all end."""
    name = found.kind.rpartition(".")[2]
    low = found.message.lower()
    return name in _AFTERMATH_KINDS or any(words in low for words in _AFTERMATH)


def root_rank(log: Log) -> int | None:
    """Return the rank that torchrun's table lists as the first one to fail."""
    for line in log.find(_ROOT):
        start = bisect_right(log.lines, line.number, key=lambda one: one.number)
        for near in log.lines[start : start + _TABLE_LINES]:
            found = _ROOT_RANK.search(near.text)
            if found is not None:
                return int(found[1])
    return None
