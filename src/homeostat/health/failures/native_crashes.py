"""Read crashes of compiled code, which leave no exception.

Fatal Python error: Segmentation fault              faulthandler, or Python itself
Current thread 0x7f3c (most recent call first):     its frames, innermost first
  File "/v/torch/cuda/graphs.py", line 77 in capture_begin

terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered

*** SIGSEGV received at time=1709021359 on cpu 44 ***
free(): invalid pointer
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

from homeostat.health.failures.frames import FRAME, Frame
from homeostat.health.failures.speakers import speaker_in
from homeostat.health.failures.tracebacks import Traceback
from homeostat.health.log import Log, LogLine

_FATAL = "Fatal Python error:"
_TERMINATE = "terminate called after throwing an instance of"
_THROWN = re.compile(r"instance of '(?P<kind>[^']{1,200})'")
_RECEIVED = re.compile(r"\*\*\* (?P<kind>SIG[A-Z]{2,10})")
_FIRST = "(most recent call first)"
# Messages of the C library before it calls abort().
GLIBC = ("double free or corruption", "free(): invalid", "malloc(): ", "munmap_chunk(): invalid",
         "corrupted size vs. prev_size", "corrupted double-linked list", "realloc(): invalid",
         "stack smashing detected", "free(): double free",
         "pure virtual method called")  # fmt: skip
_MAX_FOUND = 64
# Number of lines that may lie between a crash's first line and the rest of its report.
_NEAR = 12
_MAX_FRAMES = 200


def native_crashes(log: Log) -> list[Traceback]:
    """Return the crashes of compiled code in a log, in order. Each crash is returned once."""
    found = [
        *(_fatal(log, line) for line in _lines(log, _FATAL)),
        *(_thrown(log, line) for line in _lines(log, _TERMINATE)),
        *(
            one
            for line in _lines(log, "SIG* received at time")
            if (one := _received(line)) is not None
        ),
        *(_plain(line, words) for words in GLIBC for line in _lines(log, words)),
    ]
    found.sort(key=lambda one: one.start.number)
    kept: list[Traceback] = []
    for one in found:
        same = [
            k for k in kept if k.speaker == one.speaker and one.start.number - k.end.number < 40
        ]
        if not same:
            kept.append(one)
        elif one.frames and not same[-1].frames:
            kept[kept.index(same[-1])] = one
    return kept


def _lines(log: Log, words: str) -> list[LogLine]:
    return list(islice(log.find(words), _MAX_FOUND))


def _fatal(log: Log, line: LogLine) -> Traceback:
    speaker, text = speaker_in(line.text)
    what = text.partition(_FATAL)[2].strip() or "a fatal error"
    frames, end = _dumped(log, line, speaker)
    return _crash(line, end, frames, _signal_of(what), what, speaker)


def _dumped(log: Log, line: LogLine, speaker: str) -> tuple[tuple[Frame, ...], LogLine]:
    """Return the frames of the current thread, or of the first one, outermost first."""
    frames: list[Frame] = []
    end, is_in, waited = line, False, 0
    for other, text in _after(log, line, speaker):
        if _FIRST in text:
            if frames and ("Current thread" not in text or len(frames) > _MAX_FRAMES):
                break
            frames, is_in = [], True
        elif is_in and (found := FRAME.search(text[:2_000])) is not None:
            frames.append(Frame(found["file"], int(found["line"]), (found["name"] or "").strip()))
            end = other
        elif frames:
            break
        else:
            waited += 1
            if waited > _NEAR:
                break
    return tuple(reversed(frames)), end


def _after(log: Log, line: LogLine, speaker: str) -> Iterator[tuple[LogLine, str]]:
    """Yield the lines that the same process printed after a line."""
    start = bisect_right(log.lines, line.number, key=lambda one: one.number)
    for other in log.lines[start : start + 4 * _MAX_FRAMES]:
        who, text = speaker_in(other.text)
        if who == speaker:
            yield other, text


def _thrown(log: Log, line: LogLine) -> Traceback:
    speaker, text = speaker_in(line.text)
    found = _THROWN.search(text)
    kind = found["kind"] if found is not None else "a C++ exception"
    for near, (other, words) in enumerate(_after(log, line, speaker)):
        if "what():" in words:
            return _crash(line, other, (), kind, words.partition("what():")[2].strip(), speaker)
        if near > _NEAR:
            break
    return _crash(line, line, (), kind, "", speaker)


def _received(line: LogLine) -> Traceback | None:
    speaker, text = speaker_in(line.text)
    found = _RECEIVED.search(text)
    if found is None:
        return None
    return _crash(line, line, (), found["kind"], "", speaker)


def _plain(line: LogLine, words: str) -> Traceback:
    speaker, _ = speaker_in(line.text)
    return _crash(line, line, (), "SIGABRT", words.strip(": "), speaker)


def _signal_of(what: str) -> str:
    low = what.lower()
    for words, name in (("segmentation", "SIGSEGV"), ("abort", "SIGABRT"), ("bus", "SIGBUS"),
                        ("illegal", "SIGILL"), ("floating", "SIGFPE")):  # fmt: skip
        if words in low:
            return name
    return "Fatal Python error"


def _crash(
    start: LogLine, end: LogLine, frames: tuple[Frame, ...], kind: str, message: str, speaker: str
) -> Traceback:
    return Traceback(start, end, frames, kind, message, speaker, is_native=True)
