"""Parse the tracebacks of a log: frames, exception, and which part is the user's own code.

    File "/data/ana/train.py", line 88, in <module>                  the user's
    File ".../site-packages/trl/trainer/grpo_trainer.py", line ...   a library's
    File "/data/ana/train.py", line 41, in accuracy                  the user's: it raised
    AttributeError: 'NoneType' object has no attribute 'group'

It reads Python's own format, with whatever Ray, torchrun and loggers put before each line, that of
notebooks, the boxes that rich draws, and Ray's copy of a task's error. All functions here are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from homeostat.health.log import Log, LogLine

_HEADER = "traceback (most recent call last)"
_IGNORED = "exception ignored in"
_RAY_TASK = "RayTaskError("
_FRAME = re.compile(
    r'File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9})(?:, in (?P<name>\S.{0,120}))?'
)
# IPython names a cell, or a file with its line after a colon.
_CELL = re.compile(
    r"(?:File (?P<file>[^\s:]{1,400}\.py):(?P<line>\d{1,9}), in (?P<name>[\w.<>]{1,120})"
    r"|(?P<cell>Cell In ?\[\d{1,9}\]), line (?P<at>\d{1,9})(?:, in (?P<function>[\w.<>]{1,120}))?)"
)
_BOXED = re.compile(r"(?P<file>[^\s:]{1,400}\.py):(?P<line>\d{1,9}) in (?P<name>[\w<>.]{1,120})")
# The class of an exception with its module: a capitalised name, then a colon or nothing.
_ERROR = re.compile(r"(?P<kind>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80})(?:: ?(?P<words>.*))?")
_BRACKETS = {"(": ")", "[": "]"}
_BOX = "\u2502\u256d\u2570\u2500|+"
# Number of lines without a frame after which a traceback counts as interrupted.
_MAX_BETWEEN = 12
_MAX_TRACEBACKS = 2_000
_INSTALLED = ("site-packages/", "dist-packages/", "<frozen ", "<string>", "/bin/")
_STDLIB = re.compile(r"/lib(?:64)?/python3[.\d]*/(?!site-packages|dist-packages)")
# Code that a framework writes into the working directory.
_GENERATED = "unsloth_compiled_cache"
# Folders next to a framework's package that contain what users write or copy.
_OF_USERS = ("examples", "example", "recipe", "recipes", "scripts", "projects", "custom", "tests")
_PACKAGES = frozenset(
    (
        "accelerate", "areal", "axolotl", "chatlearn", "datasets", "deepspeed", "homeostat",
        "lightrft", "litgpt", "llamafactory", "megatron", "miles", "miles_plugins", "nemo_rl",
        "open_instruct", "openrlhf", "peft", "prime_rl", "ray", "roll", "sgl", "sglang",
        "skyrl_train", "slime", "slime_plugins", "swift", "torch", "torchforge", "torchtitan",
        "torchtune", "transformers", "trl", "unsloth", "unsloth_zoo",
        "verl", "vllm",
    )
)  # fmt: skip
# Exceptions that report another process's failure: the reason is in that process's traceback.
_REPORTS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException", "RayActorError",
            "ActorDiedError", "ProcessRaisedException")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in the code, as the log names it."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line} in {self.function}"
            if self.function
            else (f"{self.file}:{self.line}")
        )


@dataclass(frozen=True, slots=True)
class Traceback:
    """An exception with its frames, outermost first. `end` is the line with the message."""

    start: LogLine
    end: LogLine
    frames: tuple[Frame, ...]
    kind: str
    message: str

    @property
    def error(self) -> str:
        """Return the class without its module, and the message."""
        name = self.kind.rpartition(".")[2]
        return f"{name}: {self.message}" if self.message else name

    @property
    def is_report(self) -> bool:
        """Return whether it only reports that another process failed, without the reason."""
        return self.kind.rpartition(".")[2].startswith(_REPORTS)

    @property
    def user_frame(self) -> Frame | None:
        """Return the user's function that raised, or called what raised; None if a library failed.

        A frame is to blame if no frame of a training or model library is below it. If no such
        library called it, the user's own line must have raised: what a script asks of other
        packages is for them to explain.
        """
        owners = [owner_of(frame.file) for frame in self.frames]
        mine = [place for place, owner in enumerate(owners) if owner == "user"]
        if not mine or "framework" in owners[mine[-1] :]:
            return None
        below = owners[mine[-1] + 1 :]
        if "framework" not in owners[: mine[-1]] and any(owner != "stdlib" for owner in below):
            return None
        return self._named(self.frames[mine[-1]])

    def _named(self, frame: Frame) -> Frame:
        """Return the frame with the name of its function: a comprehension has none."""
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
        """Return whether a training library called what raised, such as a reward or a dataset."""
        return any(owner_of(frame.file) == "framework" for frame in self.frames)


def owner_of(file: str) -> str:
    """Return whose code a file is:

    "user", "framework" (trainers, engines, torch), "package" or "stdlib".
    """
    path = file.replace("\\", "/")
    parts = path.split("/")
    inside = next((path.partition(mark)[2] for mark in _INSTALLED[:2] if mark in path), None)
    if inside is not None:
        return "framework" if inside.split("/")[0].removesuffix(".py") in _PACKAGES else "package"
    if _STDLIB.search(path):
        return "stdlib"
    if any(mark in path for mark in _INSTALLED[2:]):
        return "package"
    if _GENERATED in parts:
        return "framework"
    places = [place for place, part in enumerate(parts[:-1]) if part in _PACKAGES]
    if not places:
        return "user"
    before, rest = parts[places[-1] - 1] if places[-1] else "", parts[places[-1] + 1 :]
    # A checkout: the package is in a folder of its name, in src/ or python/, or has folders.
    is_package = before in ("src", "python", parts[places[-1]]) or len(rest) > 1
    return "framework" if is_package and rest[0] not in _OF_USERS else "user"


@dataclass(slots=True)
class _Open:
    """A traceback that is being read."""

    start: LogLine
    prefix: int
    is_boxed: bool = False
    frames: list[Frame] = field(default_factory=list)
    between: int = 0


def tracebacks(log: Log) -> tuple[Traceback, ...]:
    """Return all tracebacks of a log, in order, except those that Python itself ignored."""
    if not log.has(_HEADER, _RAY_TASK):
        return ()
    return tuple(_read(log.lines))


def _read(lines: Sequence[LogLine]) -> Iterator[Traceback]:
    opened: _Open | None = None
    previous, num = "", 0
    for line in lines:
        at = line.text.lower().find(_HEADER)
        if at >= 0:
            boxed = any(char in line.text for char in _BOX[:4])
            opened = None if _IGNORED in previous else _Open(line, at, boxed)
        elif opened is not None:
            found = _next(opened, line)
            if found is not None:
                yield found
                num += 1
                # Ray repeats the frames of the task below the name of its error.
                is_task = _RAY_TASK in found.kind + line.text
                opened = _Open(line, 0) if is_task else None
            elif opened.between > _MAX_BETWEEN:
                opened = None
        elif _RAY_TASK in line.text:
            opened = _Open(line, 0)
        previous = line.text.lower()
        if num >= _MAX_TRACEBACKS:
            return


def _next(opened: _Open, line: LogLine) -> Traceback | None:
    """Take in a line; return the traceback if it is the last one."""
    frame = _frame_in(line.text, is_boxed=opened.is_boxed)
    if frame is not None:
        opened.frames.append(frame)
        opened.between = 0
        return None
    text = _bare(line.text, opened)
    if not text or text[0].isspace() or text[0] in _BOX:
        return None
    error = _ERROR.fullmatch(text[:2_000].rstrip())
    if error is None or not opened.frames:
        opened.between += 1
        return None
    words = (error["words"] or "").strip()
    return Traceback(opened.start, line, tuple(opened.frames), error["kind"], words)


def _frame_in(text: str, *, is_boxed: bool) -> Frame | None:
    found = _BOXED.search(text[:500]) if is_boxed else _FRAME.search(text[:2_000])
    if found is None and text.startswith(("File ", "Cell In")):
        found = _CELL.match(text)
        if found is not None and found["cell"]:
            return Frame(found["cell"], int(found["at"]), found["function"] or "")
    if found is None:
        return None
    return Frame(found["file"], int(found["line"]), (found["name"] or "").strip())


def _bare(text: str, opened: _Open) -> str:
    """Return the line without the prefix that the header has, too."""
    prefix = opened.start.text[: opened.prefix]
    if prefix and not opened.is_boxed and _shape(text[: len(prefix)]) == _shape(prefix):
        return text[len(prefix) :]
    while text[:1] in _BRACKETS:
        end = text.find(_BRACKETS[text[0]])
        if end < 0:
            break
        # One space belongs to the prefix, further ones belong to the line.
        text = text[end + 1 :].removeprefix(":").removeprefix(" ")
    return text


def _shape(text: str) -> str:
    return re.sub(r"\d", "0", text)
