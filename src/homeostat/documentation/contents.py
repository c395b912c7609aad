"""The order of the documentation's pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Title of a group -> pages below docs/, without their suffix. A page that is in no group is listed
# under "More".
_GROUPS: dict[str, tuple[str, ...]] = {
    "Start": ("guide/first_run", "guide/everyday_jobs", "guide/moving"),
    "Train": (
        "guide/data",
        "guide/models",
        "guide/preferences",
        "guide/reward_models",
        "guide/reinforcement_learning",
        "guide/energies",
        "guide/critics",
        "guide/data_mixing",
        "guide/checkpoints_and_resume",
    ),
    "Use a model": ("guide/using_models",),
    "From Python": ("guide/python", "guide/plugins"),
    "Larger": (
        "guide/several_ranks",
        "guide/precision",
        "guide/experts",
        "guide/engines_and_sync",
        "guide/async",
        "guide/ray",
        "guide/scale",
    ),
    "Stay healthy": (
        "guide/doctor",
        "guide/live",
        "guide/dashboard",
        "guide/when_things_go_wrong",
        "guide/clinic",
    ),
    "Reference": (
        "reference/config",
        "reference/cli",
        "reference/metrics",
        "reference/events",
        "reference/run_folder",
        "reference/rules",
        "reference/coverage",
    ),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Pages that are listed together, by their path below docs/ without suffix."""

    title: str
    pages: tuple[str, ...]


def contents(docs: Path) -> Iterator[Group]:
    """Yield the groups of pages that exist. Pages of single rules are found through their table."""
    files = {file.relative_to(docs).with_suffix("").as_posix() for file in docs.glob("*/*.md")}
    listed = {page for pages in _GROUPS.values() for page in pages}
    rest = tuple(sorted(files - listed))
    for title, pages in _GROUPS.items():
        if title == "Reference" and rest:
            yield Group("More", rest)
        yield Group(title, tuple(page for page in pages if page in files))
