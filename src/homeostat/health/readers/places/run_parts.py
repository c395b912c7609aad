"""Recognise folders and files that hold the training rows and the held-out rows of one run.

    logs/train/events.out.tfevents..., logs/validation/events.out.tfevents...      Keras
    runs/x/loss_train/events..., runs/x/loss_val/events...                         add_scalars
    out/train.csv, out/val.csv                                                     scripts

Both files name their metrics alike, so the folder or the file's name says which rows are meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from homeostat.health.readers.lines.held_out import named_held_out
from homeostat.health.readers.values.metric_words import loss_of_rows
from homeostat.health.readers.views.build import Found

_WORDS = re.compile(r"[A-Za-z]+|\d+")


def are_parts(names: Iterable[str]) -> bool:
    """Return whether folders are the parts of one run: their names differ in that word alone."""
    parts: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        words = _WORDS.findall(name.lower())
        said = [part for word in words if (part := loss_of_rows(word)) is not None]
        if len(said) != 1:
            return False
        rest = tuple(word for word in words if loss_of_rows(word) is None)
        parts.setdefault(rest, set()).update(said)
    return bool(parts) and all(len(said) == 2 for said in parts.values())


def mark_held_out(read: Sequence[tuple[Path, Found]], folder: Path) -> None:
    """Rename the metrics of held-out files that another file has by the same name."""
    held, others = [], set[str]()
    for file, found in read:
        if _is_held_out(file.relative_to(folder)):
            held.append(found)
        else:
            others.update(found.series)
    for found in held:
        found.series = {
            named_held_out(name) if name in others else name: one
            for name, one in found.series.items()
        }


def _is_held_out(file: Path) -> bool:
    """Return whether a file's name or folders name held-out rows, and none names training rows."""
    words = _WORDS.findall(" ".join((*file.parts[:-1], file.name.partition(".")[0])))
    said = {loss_of_rows(word) for word in words} - {None}
    return said == {"val_loss"}
