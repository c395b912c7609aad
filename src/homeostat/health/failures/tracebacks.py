"""Parse the tracebacks of a log: frames, exception, and which part is the user's own code.

    File "/data/ana/train.py", line 88, in <module>                  the user's
    File ".../site-packages/trl/trainer/grpo_trainer.py", line ...   a library's
    File "/data/ana/train.py", line 41, in accuracy                  the user's: it raised
    AttributeError: 'NoneType' object has no attribute 'group'

It reads Python's own format, also with the prefixes of Ray, torchrun and loggers, the formats of
notebooks and rich, groups of exceptions, and Ray's copy of a task's error. Lines of several
processes may alternate, and a traceback may lack its first or last lines. native_crashes.py reads
crashes of compiled code. All functions are pure.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from homeostat.health.failures.code_owners import owner_of
from homeostat.health.failures.frames import BOX, Frame, FrameReader
from homeostat.health.failures.speakers import spoken_lines
from homeostat.health.log import Log, LogLine

_HEADER = "traceback (most recent call"
IGNORED = "exception ignored in"
# After such a line Ray repeats the frames and the error of a task, or of an actor's creation.
_RAY_COPIES = ("RayTaskError(", "error raised in its creation task, ray::")
_LINKS = {
    "during handling of the above exception": "handling",
    "the above exception was the direct cause": "cause",
}
# A frame at the start of a line; only tracebacks print frames there.
_HEADLESS = re.compile(r'\s{0,12}File "[^"]{1,400}", line \d{1,9}, in \S')
# An exception class with its module: a capitalised name, then a colon or the end of the line.
ERROR = re.compile(
    r"(?P<kind>(?:[A-Za-z_]\w{0,80}\.){0,8}(?:_?[A-Z]\w{0,80}(?:\([A-Z]\w{0,80}\))?"
    r"|(?<=\.)(?:error|timeout|gaierror|herror)))(?:: ?(?P<words>.*))?"
)
EXCEPTION_NAME = re.compile(
    r"\w{0,80}(?:Error|Exception|Interrupt|Exit|Timeout|Failed|Failure|Died|Iteration|NotFound)"
    r"(?:\(\w{1,80}\))?"
)
# Words at the start of a line that come from loggers and launchers, and are no exception classes.
NO_CLASSES = frozenset(
    ("INFO", "WARNING", "WARN", "DEBUG", "ERROR", "CRITICAL", "FATAL", "NOTE", "Note", "Warning",
     "Killed", "Aborted", "Terminated", "Epoch", "Step", "Training", "Loading", "Saving")
)  # fmt: skip
# The prefix of a logger before an error: time, level, and place in the code.
LOGGER = re.compile(
    r"^(?>\[[^\[\]]{1,120}+\]:?\s{0,4}+|\d[\d:.,TZ/-]{3,40}+\s{0,4}+"
    r"|(?:ERROR|CRITICAL|FATAL|error|E)\b[\s:|-]{0,6}+"
    r"|[\w/]{1,80}+\.(?:py|cc|cpp):\d{1,6}+\]?:?\s{0,4}+){1,6}+"
)
# Several processes wrote the same error into one line: a class name repeated, then as many colons.
_TANGLED = re.compile(
    r"(?P<all>(?P<kind>(?:[a-z_]\w{0,40}\.){0,4}[A-Z]\w{0,60}?(?:Error|Exception))(?P=kind){1,15})"
    r"(?:: ?){2,32}"
)
_BRACKETS = {"(": ")", "[": "]"}
_GROUP = re.compile(r"\s{0,40}[|+](?:-\+-{1,20}.{0,20})?\s?")
# After this many lines without a frame, a traceback counts as interrupted.
MAX_BETWEEN = 12
_MAX_TRACEBACKS = 2_000
# Texts that begin a traceback or a part of one, and the number of lines after them that are read.
_MARKS = (_HEADER, *_RAY_COPIES, 'File "*", line ', *_LINKS)
_WINDOW = 400
_MAX_OPEN = 64
# Exceptions that report the failure of another process, whose traceback gives the reason.
_REPORTS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException", "RayActorError",
            "ActorDiedError", "ProcessRaisedException", "WorkerCrashedError", "EngineDeadError",
            "BrokenProcessPool", "RemoteTraceback", "_RemoteTraceback", "RayTaskError",
            "ExceptionGroup", "BaseExceptionGroup")  # fmt: skip


# A worker's exception that is raised again. The worker's own traceback follows.
_CAUGHT = re.compile(r"\bin (?:DataLoader worker process|replica|pin memory thread)\b")


@dataclass(frozen=True, slots=True)
class Traceback:
    """An exception with its frames, outermost first. `end` is the line with the message.

    `speaker` is the process that printed it, "" if its lines name none. `link` is "cause" or
    "handling" if Python printed that the exception was raised from the one before it, or while that
    one was handled. `has_head` is False if the outermost frames are not in the log, `has_tail` if
    the exception's own line is not. `is_native` means that compiled code crashed without an
    exception.
    """

    start: LogLine
    end: LogLine
    frames: tuple[Frame, ...]
    kind: str
    message: str
    speaker: str = ""
    link: str = ""
    has_head: bool = True
    has_tail: bool = True
    is_native: bool = False

    @property
    def name(self) -> str:
        """Return the exception's class without its module."""
        return self.kind.rpartition(".")[2] if "(" not in self.kind else self.kind

    @property
    def error(self) -> str:
        """Return the exception's class without its module, and the message."""
        if not self.has_tail:
            return "an exception whose name and text are cut off"
        return f"{self.name}: {self.message}" if self.message else self.name

    @property
    def is_report(self) -> bool:
        """Return whether it only reports that another process failed, without the reason."""
        is_caught = self.message.startswith("Caught ") and _CAUGHT.search(self.message) is not None
        return is_caught or self.kind.rpartition(".")[2].startswith(_REPORTS)

    @property
    def user_frame(self) -> Frame | None:
        """Return the user's function that caused the exception; None if a library failed.

        It is the innermost frame of the user's code, but only if no training or model library has a
        deeper frame. If no such library called it, no other package may have a deeper frame either:
        if a script calls a package that fails, the package is the cause.
        """
        owners = [owner_of(frame.file) for frame in self.frames]
        mine = [place for place, owner in enumerate(owners) if owner == "user"]
        if not mine or "framework" in owners[mine[-1] :]:
            return None
        below = owners[mine[-1] + 1 :]
        if "framework" not in owners[: mine[-1]] and any(owner != "stdlib" for owner in below):
            return None
        return self.named(self.frames[mine[-1]])

    @property
    def deepest_user_frame(self) -> Frame | None:
        """Return the innermost frame of the user's code, even if code below it raised."""
        mine = [frame for frame in self.frames if owner_of(frame.file) == "user"]
        return self.named(mine[-1]) if mine else None

    def named(self, frame: Frame) -> Frame:
        """Return the frame with a function name. A comprehension takes that of its function."""
        if not frame.function.startswith("<"):
            return frame
        around = [f for f in self.frames if f.file == frame.file and f.line == frame.line]
        named = [f for f in around if not f.function.startswith("<")]
        return named[-1] if named else frame

    @property
    def caller(self) -> str:
        """Return the library function that called the user's code; "" if none did."""
        owners = [owner_of(frame.file) for frame in self.frames]
        mine = [place for place, owner in enumerate(owners) if owner == "user"]
        libraries = [f for f, owner in zip(self.frames, owners, strict=True) if owner != "user"]
        above = [f for f in self.frames[: mine[-1]] if f in libraries] if mine else []
        return above[-1].function if above else ""

    @property
    def is_called_by_library(self) -> bool:
        """Return whether a training library called the code that raised: a reward, a dataset."""
        return any(owner_of(frame.file) == "framework" for frame in self.frames)


@dataclass(slots=True)
class _Open:
    """A traceback that is being read."""

    start: LogLine
    head: str
    prefix: int
    speaker: str
    reader: FrameReader = field(default_factory=FrameReader)
    link: str = ""
    has_head: bool = True
    last: LogLine | None = None
    between: int = 0

    @property
    def frames(self) -> list[Frame]:
        return self.reader.frames


def tracebacks(log: Log) -> tuple[Traceback, ...]:
    """Return all tracebacks of a log in order, except those of exceptions that Python ignored."""
    reader = _Reader()
    found: list[Traceback] = []
    for lines in _windows(log):
        found += reader.read(lines)
        if len(found) >= _MAX_TRACEBACKS:
            break
        found += reader.cut_off(log)
        reader = _Reader()
    return tuple(found)


def _windows(log: Log) -> Iterator[Sequence[LogLine]]:
    """Yield the parts of a log with tracebacks: the lines after a header or a frame."""
    marks = sorted({line.number for words in _MARKS for line in log.find(words)})
    begin = end = 0
    for number in marks:
        # The line before it shows whether Python ignored the exception.
        start = max(0, bisect_left(log.lines, number, key=lambda line: line.number) - 1)
        if start > end:
            yield log.lines[begin:end]
            begin = start
        end = bisect_right(log.lines, number + _WINDOW, key=lambda line: line.number)
    yield log.lines[begin:end]


class _Reader:
    """The unfinished tracebacks of every speaker, innermost last."""

    def __init__(self) -> None:
        self._open: dict[str, list[_Open]] = {}
        self._links: dict[str, str] = {}
        self._previous: dict[str, str] = {}
        # Speakers that print a traceback of an exception which Python ignores.
        self._ignored: set[str] = set()

    def read(self, lines: Sequence[LogLine]) -> Iterator[Traceback]:
        for line, speaker, text in spoken_lines(lines):
            found = self._next(line, speaker, text)
            self._previous[speaker] = text[:200].lower()
            if len(self._previous) > 4_096:
                self._previous.clear()
            if found is not None:
                yield found

    def _next(self, line: LogLine, speaker: str, text: str) -> Traceback | None:
        low = text.lower()
        at = low.find(_HEADER)
        opened = self._open.get(speaker)
        if at >= 0:
            if IGNORED in self._previous.get(speaker, ""):
                self._ignored.add(speaker)
            else:
                self._ignored.discard(speaker)
                boxed = any(char in text[:at] for char in BOX[:4])
                self._push(_Open(line, text, at, speaker, FrameReader(boxed)))
            return None
        if speaker in self._ignored:
            if not text[:1].isspace():
                self._ignored.discard(speaker)
            return None
        link = next((name for words, name in _LINKS.items() if words in low), "")
        if link:
            self._links[speaker] = link
            return None
        if opened:
            return self._take(opened, line, text)
        if any(words in text for words in _RAY_COPIES):
            self._push(_Open(line, "", 0, speaker))
        elif (at := text.find('File "')) >= 0 and _HEADLESS.match(LOGGER.sub("", text[:400])):
            prefix = len(text[:at].removesuffix("  "))
            self._push(_Open(line, text[:at], prefix, speaker, has_head=False))
            return self._take(self._open[speaker], line, text)
        return None

    def _push(self, opened: _Open) -> None:
        opened.link = self._links.pop(opened.speaker, "")
        stack = self._open.setdefault(opened.speaker, [])
        stack.append(opened)
        del stack[:-4]
        if len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]

    def _take(self, stack: list[_Open], line: LogLine, text: str) -> Traceback | None:
        opened = stack[-1]
        opened.last = line
        found = _closed(opened, line, text)
        if found is not None:
            stack.pop()
            # After the name of a task's error, Ray repeats the frames of the task.
            if any(words in found.kind + text for words in _RAY_COPIES):
                stack.append(_Open(line, "", 0, opened.speaker))
        elif opened.between > MAX_BETWEEN:
            stack.clear()
        if not stack:
            self._open.pop(opened.speaker, None)
        return found

    def cut_off(self, log: Log) -> Iterator[Traceback]:
        """Yield the tracebacks that are incomplete because the log ends."""
        for stack in self._open.values():
            opened = stack[-1]
            last = opened.last or opened.start
            # Ray's copy of an error is left out: it was read as the error of its task.
            is_ray_copy = not opened.head and opened.has_head
            if is_ray_copy or log.lines[-1].number - last.number > MAX_BETWEEN:
                continue
            if opened.frames or opened.head:
                frames = tuple(opened.frames)
                yield Traceback(
                    opened.start, last, frames, "", "", opened.speaker, opened.link,
                    opened.has_head, has_tail=False,
                )  # fmt: skip


def _closed(opened: _Open, line: LogLine, text: str) -> Traceback | None:
    """Read a line; return the traceback if the line completes it."""
    if opened.reader.take(text):
        opened.between = 0
        return None
    text = untangled(_bare(text, opened))
    if not text or text[0].isspace() or text[0] in BOX:
        return None
    error = ERROR.fullmatch(text[:2_000].rstrip())
    if error is None or not opened.frames or not _is_exception(error["kind"], opened):
        opened.between += 1
        return None
    words = (error["words"] or "").strip()
    return Traceback(
        opened.start, line, tuple(opened.frames), error["kind"], words, opened.speaker,
        opened.link, opened.has_head,
    )  # fmt: skip


def untangled(text: str) -> str:
    """Return the line that one process wrote, if several wrote the same error into one line.

    KeyErrorKeyError: : 'x'  and  ValueErrorValueErrorValueError: : : no rowno rowno row
    """
    found = _TANGLED.match(text[:2_000])
    if found is None:
        return text
    times = len(found["all"]) // len(found["kind"])
    words = text[found.end() :]
    part, rest = divmod(len(words), times)
    if part and not rest and words == words[:part] * times:
        words = words[:part]
    return f"{found['kind']}: {words}"


def _is_exception(kind: str, opened: _Open) -> bool:
    """Return whether a name is an exception's. Without a head it must be named like one."""
    name = kind.rpartition(".")[2] if "(" not in kind else kind
    if name in NO_CLASSES:
        return False
    return opened.has_head or EXCEPTION_NAME.fullmatch(name) is not None


def _bare(text: str, opened: _Open) -> str:
    """Return the line without the prefix that the traceback's header also has."""
    prefix = opened.head[: opened.prefix]
    if prefix.strip() and not opened.reader.is_boxed:
        if prefix.strip()[0] in "|+":
            return _GROUP.sub("", text, count=1)
        found = _like(prefix).match(text)
        if found is not None:
            return text[found.end() :]
    elif prefix and text.startswith(prefix):
        return text[len(prefix) :]
    while text[:1] in _BRACKETS:
        end = text.find(_BRACKETS[text[0]])
        if end < 0:
            break
        # The first space belongs to the prefix, further spaces to the line.
        text = text[end + 1 :].removeprefix(":").removeprefix(" ")
    return text


def _like(prefix: str) -> re.Pattern[str]:
    """Return a pattern of prefixes that differ from this one only in their numbers."""
    return re.compile(re.sub(r"\d{1,40}", r"\\d{1,40}", re.escape(prefix[-300:])))
