"""Parse literals over several lines, as pprint and indented JSON print configs and metrics.

    ... - Step 3:                     {
    {'reward/mean': '0.4219',           "loss": 0.51,
     'trainer/global_step': 3}          "grad_norm": 0.2
                                      }

Lines of other actors, progress bars and messages may appear in between; they are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from homeostat.health.readers.values.literals import MAX_CHARS, mapping_at

_MAX_LINES = 3_000
# After this many consecutive lines that do not belong to it, a literal counts as incomplete.
_MAX_FOREIGN = 20
_OPENS = re.compile(r"(?:^|\s)(?:\w*(?:Namespace|Config|Arguments|Args)\(|\{)")
_INSIDE = re.compile(r"\s*['\"{}\])]|\s+(?!File \")\S")
_PAIR = re.compile(r"\s*['\"{}\])]")


@dataclass(frozen=True, slots=True)
class Dump:
    """A complete literal: the text before it, its mapping (None: incomplete), and its lines."""

    before: str
    mapping: dict[str, Any] | None
    lines: tuple[str, ...]


class Dumps:
    """Collect the lines of the open literal, and remember the line above it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0
        self._num_chars = 0
        self._num_foreign = 0
        self._source = ""
        self._above = ("", "")
        self._before = ""

    @property
    def is_open(self) -> bool:
        return bool(self._lines)

    def opens(self, body: str) -> bool:
        return not self._lines and _OPENS.search(body) is not None

    def heading(self, body: str, source: str) -> None:
        """Remember a line outside of a literal: it may name the step of the literal below it."""
        self._above = (body, source)

    def holds(self, body: str, source: str) -> bool:
        """Return whether a line can only be a part of the open literal: a pair, or its end."""
        return self._is_inside(body, source) and _PAIR.match(body) is not None

    def add(self, body: str, source: str) -> Dump | None:
        """Add a line that may belong to a literal; return the literal if the line completes it."""
        if not self._lines:
            above, of = self._above
            self._source, self._before = source, above if of == source else ""
        elif not self._is_inside(body, source):
            self._num_foreign += 1
            return self.close() if self._num_foreign > _MAX_FOREIGN else None
        self._num_foreign = 0
        self._lines.append(body)
        self._num_chars += len(body)
        self._depth += body.count("{") + body.count("(") - body.count("}") - body.count(")")
        is_bounded = len(self._lines) < _MAX_LINES and self._num_chars < MAX_CHARS
        return None if self._depth > 0 and is_bounded else self.close()

    def close(self) -> Dump:
        text = "\n".join(self._lines)
        start = _OPENS.search(text)
        at = text.find(start.group().strip(), start.start()) if start else 0
        found = mapping_at(text, at) if start else None
        before = text[:at] if text[:at].strip() else self._before
        dump = Dump(before, found[0] if found is not None else None, tuple(self._lines))
        self._lines, self._depth, self._num_foreign, self._num_chars = [], 0, 0, 0
        return dump

    def _is_inside(self, body: str, source: str) -> bool:
        if not self._lines or source != self._source or "%|" in body:
            return False
        if body.startswith("{") and body.rstrip().endswith("}"):
            # This line is a separate literal.
            return False
        return _INSIDE.match(body) is not None
