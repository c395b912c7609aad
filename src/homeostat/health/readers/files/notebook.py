"""Read a Jupyter notebook as the text that its cells have printed, in the order of the cells.

The code is not read, because it was not printed. What a trainer shows as HTML becomes what the same
trainer prints on a terminal: its table one line per row, and its progress a bar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import unescape
from typing import Any

# The text of an output whose content is only in its HTML.
_STAND_INS = ("<IPython.core.display", "<Figure size")
# "[  21/4720 02:29 < 10:16:13, 0.13 it/s, Epoch 0.04/10]"; without an epoch it is an evaluation.
_PROGRESS = re.compile(
    r"\[\s*+(?P<count>\d{1,12})/(?P<total>\d{1,12})\s++(?P<time>[^\],]{0,60}+)(?P<rest>[^\]]{0,80}+)\]"
)
_TAG = re.compile(r"<(?P<end>/?)(?P<name>[A-Za-z][A-Za-z0-9]*+)[^<>]*+>|<![^<>]*+>")
_UNSEEN = frozenset({"style", "script"})
_ROW_ENDS = frozenset({"tr", "div", "p", "br", "li", "table"})


def is_notebook(document: Any) -> bool:
    """Return whether a JSON document is a notebook."""
    return isinstance(document, dict) and "nbformat" in document and "cells" in document


def printed_by(notebook: Mapping[str, Any]) -> str:
    """Return the text of all outputs of a notebook."""
    cells = notebook["cells"] if isinstance(notebook["cells"], list) else []
    return "\n".join(text for cell in cells for text in _outputs(cell))


def _outputs(cell: Any) -> Iterator[str]:
    outputs = cell.get("outputs") if isinstance(cell, dict) else None
    shown = outputs if isinstance(outputs, list) else []
    texts = [_text_of(one) for one in shown if isinstance(one, dict)]
    for text, following in zip(texts, [*texts, ""][1:], strict=True):
        # A table that grows may be saved once for each time it was drawn.
        if text and not _is_continued(text, following):
            yield text


def _is_continued(text: str, following: str) -> bool:
    """Return whether the next output is the same table with more rows."""
    rows, more = _without_bars(text), _without_bars(following)
    return bool(rows) and more[: len(rows)] == rows


def _without_bars(text: str) -> list[str]:
    return [line for line in text.splitlines() if " | " in line and "%|" not in line]


def _text_of(output: Mapping[str, Any]) -> str:
    """Return what one output shows, as text."""
    if "traceback" in output:
        return _joined(output["traceback"], between="\n")
    if "text" in output:
        return _joined(output["text"])
    data = output.get("data")
    if not isinstance(data, dict):
        return ""
    plain = _joined(data.get("text/plain"))
    if "text/html" in data and (not plain or plain.startswith(_STAND_INS)):
        return _as_text(_joined(data["text/html"]))
    return "" if plain.startswith(_STAND_INS) else plain


def _joined(lines: Any, *, between: str = "") -> str:
    if isinstance(lines, str):
        return lines
    return between.join(map(str, lines)) if isinstance(lines, list) else ""


def _as_text(html: str) -> str:
    return "\n".join(map(_with_bar, _lines(html)))


def _with_bar(line: str) -> str:
    """Return a line with the trainer's progress as the bar that a terminal shows."""
    found = _PROGRESS.search(line)
    if found is None:
        return line
    title = "" if "Epoch" in found["rest"] else "Evaluating: "
    count, total = int(found["count"]), int(found["total"])
    percent = 100 * count // max(total, 1)
    time = found["time"].replace(" ", "")
    return f"{title}{percent:3d}%|          | {count}/{total} [{time}]"


def _lines(html: str) -> Iterator[str]:
    """Yield the text of HTML: a line per row of a table, with ` | ` between its cells.

    Python's own parser takes quadratic time for tags and comments that are not closed.
    """
    cells: list[list[str]] = [[]]
    at, unseen = 0, ""
    for tag in _TAG.finditer(html):
        if not unseen:
            cells[-1].append(html[at : tag.start()])
        at = tag.end()
        name = (tag["name"] or "").lower()
        if unseen:
            unseen = "" if tag["end"] and name == unseen else unseen
        elif name in _UNSEEN:
            unseen = "" if tag["end"] else name
        elif name in _ROW_ENDS:
            yield from _line(cells)
            cells = [[]]
        elif name in {"td", "th"} and not tag["end"]:
            cells.append([])
    cells[-1].append("" if unseen else html[at:])
    yield from _line(cells)


def _line(cells: list[list[str]]) -> Iterator[str]:
    texts = [" ".join(unescape("".join(cell)).split()) for cell in cells]
    # Text before the first cell is only the space between tags.
    shown = texts[1:] if len(texts) > 1 and not texts[0] else texts
    if any(shown):
        yield " | ".join(shown)
