"""The facts about a machine that must be the same on every machine of a run. Standard library only.

The controller asks each machine for them before ranks start there: with another version a rank
would fail later with an unclear error, or compute something else.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass

# Packages whose versions decide what is computed, and what a message means.
PACKAGES = ("homeostat", "torch", "transformers", "numpy", "safetensors")


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions on one machine. A package that is not installed has None."""

    python: str
    packages: dict[str, str | None]

    @classmethod
    def here(cls, more: Sequence[str] = ()) -> Versions:
        """Return the versions on this machine, also those of `more` packages."""
        found = {name: version_of(name) for name in (*PACKAGES, *more)}
        return cls(platform.python_version(), found)


def version_of(package: str) -> str | None:
    """Return the installed version; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def differing(ours: Versions, theirs: Versions) -> list[str]:
    """Return what is of another version there, as clauses. `ours` are the controller's."""
    found = []
    if ours.python.rpartition(".")[0] != theirs.python.rpartition(".")[0]:
        found.append(f"Python {theirs.python}, the controller has {ours.python}")
    for name, version in ours.packages.items():
        if theirs.packages.get(name) != version:
            there = theirs.packages.get(name) or "is missing"
            found.append(f"{name} {there}, the controller has {version or 'none'}")
    return found


def text_of(file: str) -> str | None:
    """Return the text of a file; None if it cannot be read here."""
    try:
        with open(file, encoding="utf-8") as lines:
            return lines.read()
    except OSError:
        return None
