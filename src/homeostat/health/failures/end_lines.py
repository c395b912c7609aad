"""Recognise log lines that report how a run ended, other than by a Python exception.

Shells, kernels, schedulers, container runtimes, launchers, watchdogs and the C library print them.
Such a line counts only near the end of the log; ending.py checks that no further steps follow it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from homeostat.health.failures.native_crashes import GLIBC
from homeostat.health.log import LogLine

# A line that reports the end counts if it is within this many lines of the end of the log.
MAX_CLUSTER = 400


class End(StrEnum):
    """The kinds of end that a run can have, as far as its log shows."""

    FINISHED = "finished"
    EXCEPTION = "exception"
    KILLED = "killed"
    HUNG = "hung"
    STOPPED = "stopped"
    OPEN = "open"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class EndLine:
    """A line that reports how the run ended.

    `is_mild` is True for texts that also appear when a finished run is shut down.
    """

    how: End
    what: str
    line: LogLine
    is_mild: bool = False


@dataclass(frozen=True, slots=True)
class _Words:
    how: End
    what: str
    texts: tuple[str, ...]
    is_mild: bool = False


LAUNCHER = "its launcher reports"
BY_SIGKILL = "SIGKILL ended it: memory ran out, or somebody killed it"
# Texts in lower case. The first entry that matches a line is used.
_TABLE = (
    _Words(End.KILLED, "the kernel killed it because memory ran out", (
        "out of memory: killed process", "oom-kill", "oom_kill", "oomkilled", "oom killer",
        "killed due to memory pressure", "memory cgroup out of memory", "task 0: out of memory",
        "was killed due to the node running low on memory", "exceeded job memory limit",
        "exceeded memory limit", "step hit memory limit",
    )),
    _Words(End.KILLED, "the scheduler ended it at its time limit", (
        "due to time limit", "term_runlimit", "walltime exceeded", "exceeded limit walltime",
        "deadlineexceeded", "job killed: walltime", "exceeded its time limit",
    )),
    _Words(End.KILLED, "it was preempted or its node was lost", (
        "due to preemption", "due to node failure", "node_fail", "spot instance interruption",
        "was preempted", "instance is being preempted", "the node was low on resource",
        "status: evicted", "reason: evicted", "pod was evicted", "terminated on signal 9",
    )),
    _Words(End.KILLED, "the scheduler cancelled it", (
        "slurmstepd: error: *** job", "slurmstepd: error: *** step", "*** cancelled at",
        "force terminated job", "job was cancelled", "job cancelled", "term_owner",
    )),
    _Words(End.KILLED, BY_SIGKILL, (
        "signal 9 (sigkill)", "exitcode: -9", "exitcode : -9", "exitcode  : -9", "signals.sigkill",
        "exit code 137", "exit code: 137", "exited with code 137", "exit status 137",
        "exit code is 137", "exited (137)", "received signal: 9", "signal: killed", ": killed: 9",
        "exitcode=-9", "exit code -9", "died with signal 9", "task 0: killed", "got signal: 9",
        "terminated by signal 9", "returned exit code 137", "returned -9", "return code = -9",
    )),
    _Words(End.EXCEPTION, "it crashed in compiled code", (
        "segmentation fault", "core dumped", "fatal python error", "sigsegv", "sigabrt", "sigbus",
        "terminate called after throwing", "terminate called without an active", *GLIBC,
        "exitcode: -11", "exitcode : -11", "exitcode  : -11", "exitcode: -6", "exitcode : -6",
        "exitcode  : -6", "exitcode: -7", "exitcode  : -7", "exit code 139", "exit code: 139",
        "exit code 134", "exit code: 134", "exit code 135", "exit status 139", "exit status 134",
        "process received signal", "caught signal 11", "bus error", "illegal instruction",
        "floating point exception", "segfault encountered", "exited (139)", "exited (134)",
        "received signal 11", "received signal 6", "died with signal 11", "died with signal 6",
        "return code = -11", "return code = -7", "return code = -6", "return code = -4",
    )),
    _Words(End.HUNG, "it hung: a collective operation timed out", (
        "watchdog caught collective operation timeout", "caught collective operation timeout",
        "ran for * milliseconds before timing out", "heartbeat monitor timed out",
        "watchdog got stuck", "hccl watchdog", "failed to pass monitoredbarrier",
        "error: nccl timeout",
        "[gloo] timed out waiting", "timed out waiting * for recv operation",
    )),
    _Words(End.HUNG, "it hung until a timeout ended it", (
        "hang detected", "no heartbeat", "watchdog timeout", "appears to be hung",
        "possible hang", "deadlock detected", "is not making progress", "timeout (0:",
        "scheduler hit an exception: timeout", "engine core appears stuck",
    )),
    _Words(End.KILLED, "SIGTERM ended it: a scheduler, its launcher or a person", (
        "received sigterm", "signal 15", "exitcode: -15", "exitcode : -15", "exitcode  : -15",
        "exit code 143", "exit code: 143", "exit status 143", "exited (143)", "got signal: 15",
        "signals.sigterm", "caught sigterm", "sigterm received", "received signal: 15",
        "died with signal 15", "terminated by signal 15", "received signal sigterm",
    ), is_mild=True),
    _Words(End.STOPPED, "somebody stopped it", (
        "received sigint", "keyboardinterrupt", "keyboard interrupt", "interrupted by user",
        "exit code 130", "exit status 130", "got signal: 2", "caught ctrl-c", "received signal: 2",
    ), is_mild=True),
    _Words(End.KILLED, "its terminal or session was closed (SIGHUP)", (
        "got signal: 1\x00", "received sighup", "signals.sighup", "exit code 129",
        "exitcode: -1\x00", "hangup\x00",
    )),
    _Words(End.EXCEPTION, "the GPU reported an error", (
        "cuda out of memory", "outofmemoryerror", "cuda error:", "hip out of memory",
        "cublas_status_", "cudnn_status_", "nccl error", "ncclunhandledcudaerror",
        "ncclsystemerror", "ncclinternalerror", "an illegal memory access was encountered",
        "device-side assert triggered", "uncorrectable ecc error", "fallen off the bus",
    )),
    _Words(End.EXCEPTION, f"{LAUNCHER} that a process failed", (
        "childfailederror", "failed (exitcode:", "exitcode  : 1 (pid",
        "exited with exit code", "exited with code 1",
        "exited with code 2", "exits with return code = 1", "exited with non-zero",
        "returned non-zero exit status",
        "terminated with exit code 1", "exit code: 1\x00", "exit code 1\x00", "exit status 1\x00",
        "process completed with exit code", "status=1/failure", "non-zero exit code",
        "job failed", "failed with exit code", "worker died", "actor died unexpectedly",
        "the actor is dead", "a worker died or was killed", "mpi_abort was invoked",
        "engine process failed to start", "enginecore encountered a fatal error",
        "engine core initialization failed", "error executing job with overrides",
        "terminating job step", "no space left on device", "disk quota exceeded",
        "worker exited unexpectedly", "raylet died",
        "] error 1\x00", "] error 2\x00", "check failure stack trace",
    )),
)  # fmt: skip
# A shell reports at the end of a line why its child process ended, sometimes followed by the
# command.
_SHELL = re.compile(
    r"(?:^|: line \d{1,9}: +\d{1,9} |^\[\d{1,4}\][+-]? +(?:\d{1,9} )?|: tasks? [\d,\[\]-]{1,60}: )"
    r"(?P<what>Killed|Terminated|Aborted|Segmentation fault|Bus error|Hangup|Quit)\b"
    r"(?P<rest>.{0,200})"
)
_SHELL_ENDS = {
    "Killed": (End.KILLED, BY_SIGKILL),
    "Terminated": (End.KILLED, "SIGTERM ended it: a scheduler, its launcher or a person"),
    "Hangup": (End.KILLED, "its terminal or session was closed (SIGHUP)"),
    "Quit": (End.STOPPED, "somebody stopped it (SIGQUIT)"),
}
_CRASHED = (End.EXCEPTION, "it crashed in compiled code")
# After one rank fails, the launcher ends the others, and a logger's threads end: not the cause.
_AFTERMATH = ("closing signal sigterm", "sending sigterm", "sending signal", "forcefully exiting",
              "exception ignored in", "signal handler", "to kill", "to enable",
              "set signal")  # fmt: skip
# Lines in which these texts are a setting, a hint or an informational message.
_NOTES = re.compile(r"\b(?:INFO|DEBUG)\b|\s--\w")
# What a sentence only supposes. An error's own text may continue with such advice.
_SUPPOSED = re.compile(
    r"(?:(?!rror|xception).){0,80}?\b(?:if|in case|should) you(?: still| ever)? "
    r"(?:get|see|encounter|receive|experience|face|run into|hit)\b"
    r"|.{0,400}\b(?:[Tt]his|[Ww]hich) (?:prevents|avoids)\b",
    re.IGNORECASE,
)
# The start of a log line with level error.
_ERROR_LEVEL = re.compile(
    r"^.{0,60}?(?:\b(?:ERROR|CRITICAL|FATAL)\b|\[(?:error|critical|fatal)\]|\bE\d{4} \d\d:"
    r"|^F\d{4} \d\d:|level=(?:error|fatal)|\bError:)"
)


def end_lines(lines: Sequence[LogLine]) -> Iterator[EndLine]:
    """Yield the lines that report how a run ended, in order."""
    if not lines:
        return
    low = [line.text[:2_000].lower() + "\x00" for line in lines]
    joined = "\n".join(low)
    table = [
        (words, tuple(text.split("*") if "*" in text and "***" not in text else (text,)))
        for words in _TABLE
        for text in words.texts
    ]
    present = [(words, parts) for words, parts in table if all(part in joined for part in parts)]
    for line, text in zip(lines, low, strict=True):
        shell = _SHELL.search(line.text[:400])
        if shell is not None and _is_shells(line.text, shell):
            how, what = _SHELL_ENDS.get(shell["what"], _CRASHED)
            yield EndLine(how, what, line, is_mild=shell["what"] == "Terminated")
            continue
        if any(words in text for words in _AFTERMATH) or is_supposed(line):
            continue
        for words, parts in present:
            if all(part in text for part in parts):
                if words.is_mild or _NOTES.search(line.text[:300]) is None:
                    yield EndLine(words.how, words.what, line, is_mild=words.is_mild)
                break


def is_supposed(line: LogLine) -> bool:
    """Return whether a line says what to do in case of an error, or what keeps it from happening:
    it has not happened.
    """
    return _SUPPOSED.match(line.text) is not None


def _is_shells(text: str, found: re.Match[str]) -> bool:
    """Return whether a shell printed the text; a sentence may begin with the same word."""
    rest = found["rest"].strip()
    if found.start() == 0 and found["what"] == text.lstrip()[: len(found["what"])]:
        return not rest or rest.startswith(("(", ": ", "  "))
    return True


def error_at_end(lines: Sequence[LogLine]) -> LogLine | None:
    """Return the newest of the last three lines that is an error message; None if none is.

    Earlier lines do not count, because runs that continue also log errors.
    """
    for line in reversed(lines[-3:]):
        text = line.text.strip()
        if _ERROR_LEVEL.search(text[:300]):
            return line
    return None
