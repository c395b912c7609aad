"""Parse one frame of a traceback, as Python, notebooks or the boxes of rich print it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

FRAME = re.compile(
    r'File "(?P<file>[^"]{1,400})", line (?P<line>\d{1,9})(?:,? in (?P<name>\S.{0,120}))?'
)
# IPython prints the number of a cell, or a file and its line after a colon.
_CELL = re.compile(
    r"(?:File (?P<file>[^\s:]{1,400}\.py):(?P<line>\d{1,9})(?:, in (?P<name>[\w.<>]{1,120})|$)"
    r"|(?P<cell>Cell In ?\[\d{1,9}\]), line (?P<at>\d{1,9})(?:, in (?P<function>[\w.<>]{1,120}))?)"
)
# Older versions of IPython mark the line by an arrow below. Colab prints the file as a link.
_OLD_CELL = re.compile(
    r"\[?(?P<file>[/~\w][^\s\]]{1,400}\.py|<ipython-input-[\w-]{1,60}>)\]?"
    r"(?:\([^)]{1,100}\))? in (?P<name>[\w.<>]{1,120}(?=\(|$))"
)
_ARROW = re.compile(r"-{1,6}> ?(?P<line>\d{1,9})\b")
_BOXED = re.compile(
    r"(?P<file>[^\s:]{1,400}\.py):(?P<line>\d{1,9})(?: in (?P<name>[\w<>.]{1,120}))?(?=\s|$)"
)
_BOXED_NAME = re.compile(r"in (?P<name>[\w<>.]{1,120})$")
BOX = "\u2502\u256d\u2570\u2500|+"
_SIDES = BOX[:4]


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in the code, as the log prints it."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place} in {self.function}" if self.function else place


@dataclass(slots=True)
class FrameReader:
    """Collect the frames of one traceback from its lines in order."""

    is_boxed: bool = False
    frames: list[Frame] = field(default_factory=list)
    # The start of a path that the box breaks; the next line has the rest.
    _pending: str = ""

    def take(self, text: str) -> bool:
        """Read a line. Return True if it is a frame."""
        frame = self._in_box(text) if self.is_boxed else _frame_in(text)
        if frame is not None:
            self.frames.append(frame)
            return True
        arrow = _ARROW.match(text) if text[:1] == "-" else None
        if arrow is not None and self.frames and not self.frames[-1].line:
            self.frames[-1] = replace(self.frames[-1], line=int(arrow["line"]))
        return False

    def _in_box(self, text: str) -> Frame | None:
        """Return the frame in a line of a box; a box breaks long paths at its width."""
        body = text.strip().strip(_SIDES).strip()[:500]
        found = _BOXED.match(self._pending + body)
        self._pending = ""
        if found is not None:
            return Frame(found["file"], int(found["line"]), found["name"] or "")
        named = _BOXED_NAME.match(body)
        if named is not None and self.frames and not self.frames[-1].function:
            self.frames[-1] = replace(self.frames[-1], function=named["name"])
        elif body[:1] in ("/", "~") or body[1:3] in (":\\", ":/"):
            self._pending = body
        return None


def _frame_in(text: str) -> Frame | None:
    found = FRAME.search(text[:2_000])
    if found is not None:
        return Frame(found["file"], int(found["line"]), (found["name"] or "").strip())
    old = _OLD_CELL.match(text[:1_000]) if " in " in text else None
    if old is not None:
        return Frame(old["file"], 0, old["name"])
    cell = _CELL.match(text) if text.startswith(("File ", "Cell In")) else None
    if cell is None:
        return None
    if cell["cell"]:
        return Frame(cell["cell"], int(cell["at"]), cell["function"] or "")
    return Frame(cell["file"], int(cell["line"]), cell["name"] or "<module>")
