"""Compute where the time of a step goes, as shares and as a bar of text.

    time/* and sync/* of a step -> parts -> a bar in the panel, letters in a plain line

What no part covers is shown as "other", so that the bar is always one whole step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of work in a step. `letter` is for plain lines, `style` for the panel."""

    name: str
    letter: str
    style: str
    metrics: tuple[str, ...]


PARTS = (
    Part("generate", "G", "cyan", ("time/generate",)),
    Part("reward", "R", "yellow", ("time/reward",)),
    Part("score", "S", "blue", ("time/score",)),
    Part("train", "T", "green", ("time/train",)),
    Part("publish", "P", "magenta", ("sync/seconds",)),
    Part("wait", "W", "red", ("time/data_wait", "time/wait_groups", "time/wait_drain")),
)
OTHER = Part("other", ".", "bright_black", ())
LEGEND = "time of a step: " + ", ".join(f"{p.letter} {p.name}" for p in (*PARTS, OTHER))


def shares(metrics: Mapping[str, float]) -> list[tuple[Part, float]]:
    """Return each part's share of a step, in order; empty if nothing is known of it.

    In a run on given rows all that is not waiting is training. In an asynchronous one the engine
    samples beside the trainer: its time counts only as far as the trainer waited for it.
    """
    step_s = metrics.get("time/step", math.nan)
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    if not 0 < step_s < math.inf:
        return []
    if "time/wait_groups" in metrics:
        metrics = {n: v for n, v in metrics.items() if n not in ("time/generate", "time/reward")}
    seconds = {
        part: sum(max(0.0, metrics[name]) for name in part.metrics if name in metrics)
        for part in PARTS
    }
    if "time/generate" not in metrics and "time/data_wait" in metrics:
        train = next(part for part in PARTS if part.name == "train")
        seconds[train] = max(0.0, step_s - sum(seconds.values()))
    known_s = sum(seconds.values())
    # Parts that overlap others (an engine that samples beside the trainer) exceed the step.
    whole_s = max(step_s, known_s)
    if not 0 < known_s < math.inf:
        return []
    found = [(part, value / whole_s) for part, value in seconds.items() if value > 0]
    rest = 1.0 - known_s / whole_s
    return [*found, (OTHER, rest)] if rest > 0.005 else found


def widths(found: Sequence[tuple[Part, float]], width: int) -> list[int]:
    """Divide `width` characters among the parts; their sum is exactly `width`."""
    exact = [share * width for _, share in found]
    cells = [int(value) for value in exact]
    by_rest = sorted(range(len(cells)), key=lambda at: cells[at] - exact[at])
    for at in by_rest[: width - sum(cells)]:
        cells[at] += 1
    return cells


def letters(metrics: Mapping[str, float], *, width: int = 12) -> str:
    """Return the bar as letters in brackets, for plain lines; empty if nothing is known."""
    found = shares(metrics)
    if not found:
        return ""
    drawn = (part.letter * num for (part, _), num in zip(found, widths(found, width), strict=True))
    return f"[{''.join(drawn)}]"
