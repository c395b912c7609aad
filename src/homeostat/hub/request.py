"""What is asked of the hub: a repository, which of its files, and the setting that names it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from homeostat.config.hub_names import RepositoryKind

# Given the names of all files and a function that reads a small one, return the wanted ones.
ReadText = Callable[[str], str | None]
Choose = Callable[[Sequence[str], ReadText], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Request:
    """Some files of a repository. `part` names what `choose` selects, in records of the cache.

    `revision` is a branch, tag or commit, None for the main branch. `setting` is the key of the
    recipe, for errors.
    """

    kind: RepositoryKind
    name: str
    revision: str | None
    setting: str
    part: str
    choose: Choose

    @property
    def command(self) -> str:
        """Return the shell command that fetches the repository."""
        words = ["hf", "download", self.name]
        if self.kind == "dataset":
            words += ["--repo-type", "dataset"]
        if self.revision is not None:
            words += ["--revision", self.revision]
        return shlex.join(words)

    @property
    def folder_name(self) -> str:
        """Return the name of the repository's folder in the cache."""
        return f"{self.kind}s--{self.name.replace('/', '--')}"
