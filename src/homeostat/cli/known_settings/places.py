"""Find the places where settings are defined in the sources of a framework.

A place is a file of the repository, with `::` and the class or function that owns the setting if
there is one (`trl/trainer/grpo_config.py::GRPOConfig`). The same files are found in a checkout and,
without leading folders such as `src`, where the package is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath

from homeostat.cli.known_settings.definitions import (
    SUFFIXES,
    Definition,
    definitions,
    is_defined_by,
)

OWNED_BY = "::"
# Folders whose files use settings but do not define them.
_SKIPPED = re.compile(
    r"(^|/)(\.[^/]+|tests?|unit_tests?|docs?|examples?|benchmarks?|notebooks?|site-packages)(/|$)"
    r"|(^|/)(test_[^/]*|[^/]*_test|conftest)\.py$"
)
_CONFIG_FILE = re.compile(r"arg|conf|option|setting|schema|cli|launch|env|param", re.I)
_CONFIG_OWNER = re.compile(r"(Config|Args|Arguments|Params|Settings|Options|Mixin)$")
# Functions whose parameters a user sets.
_MAKES = ("__init__", "from_pretrained", "get_peft_model")
# Files beyond this size are data or generated.
_MAX_BYTES = 2_000_000


class Sources:
    """The files of checkouts or installed packages; each is read and parsed once."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self._read: dict[Path, frozenset[Definition]] = {}

    def file(self, path: str) -> Path | None:
        """Return the file that a place names, None if no folder has it."""
        parts = PurePosixPath(path).parts
        for start in range(max(1, len(parts) - 1)):
            for folder in self._folders:
                found = folder.joinpath(*parts[start:])
                if found.is_file():
                    return found
        return None

    def has(self, setting: str, place: str) -> bool:
        """Return whether the place still defines the setting."""
        path, _, owner = place.partition(OWNED_BY)
        file = self.file(path)
        return file is not None and any(
            one.owner == owner and is_defined_by(setting, one) for one in self._definitions(file)
        )

    def search(self, settings: Iterable[str]) -> Mapping[str, list[tuple[float, str]]]:
        """Return the places of each setting with their likelihood, the likeliest first.

        Files that are named for settings are read first, others only for what these do not define.
        """
        found: dict[str, dict[str, float]] = {setting: {} for setting in settings}
        paths = sorted(self._paths(), key=lambda one: not _is_for_settings(one[1]))
        for _, group in groupby(paths, key=lambda one: _is_for_settings(one[1])):
            words = {name: {*_words(name)} for name, places in found.items() if not places}
            for folder, path in group if words else ():
                text = _text(folder / path)
                asked = [name for name, forms in words.items() if any(one in text for one in forms)]
                for name, place, score in self._matches(folder, path, asked):
                    found[name][place] = max(found[name].get(place, 0.0), score)
        return {
            setting: sorted(
                ((score, place) for place, score in places.items()),
                key=lambda one: (-one[0], one[1]),
            )
            for setting, places in found.items()
        }

    def _matches(
        self, folder: Path, path: str, settings: Sequence[str]
    ) -> Iterator[tuple[str, str, float]]:
        for one in self._definitions(folder / path) if settings else ():
            place = f"{path}{OWNED_BY}{one.owner}" if one.owner else path
            for setting in settings:
                if is_defined_by(setting, one):
                    yield setting, place, _likelihood(setting, path, one)

    def _definitions(self, file: Path) -> frozenset[Definition]:
        if file not in self._read:
            self._read[file] = definitions(_text(file), path=file.name)
        return self._read[file]

    def _paths(self) -> Iterator[tuple[Path, str]]:
        for folder in self._folders:
            for where, folders, files in os.walk(folder):
                here = Path(where).relative_to(folder)
                folders[:] = sorted(one for one in folders if not _SKIPPED.search(str(here / one)))
                for name in sorted(files):
                    path = (here / name).as_posix()
                    if path.endswith(SUFFIXES) and not _SKIPPED.search(path):
                        yield folder, path


def _text(file: Path) -> str:
    if file.stat().st_size > _MAX_BYTES:
        return ""
    return file.read_text(encoding="utf-8", errors="replace")


def _is_for_settings(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.endswith((".yaml", ".yml")) or _CONFIG_FILE.search(name) is not None


def _words(setting: str) -> Iterator[str]:
    """Return the words one of which a file that defines the setting must have."""
    last = setting.replace("[]", "").rpartition(".")[2].lstrip("-")
    for name in (last, last.removeprefix("no-")):
        yield name
        yield name.replace("-", "_")
    # A macro defines a variable by its name without the prefix.
    if setting.isupper() or setting.startswith("RAY_"):
        yield setting.partition("_")[2]


def _likelihood(setting: str, path: str, found: Definition) -> float:
    """Rank places of one setting: flags and whole paths first, then fields of config classes."""
    bare = setting.replace("[]", "").lstrip("-")
    sections = bare.split(".")[:-1]
    score = 1.0 if _is_for_settings(path) else 0.0
    score += 0.5 if any(_alike(section, path) for section in sections) else 0.0
    score -= 0.05 * path.count("/")
    if found.is_path:
        return score + 1.0 + found.name.count(".") + (2.0 if found.name == bare else 0.0)
    if found.name.startswith("--"):
        return score + (3.0 if found.name == setting else 2.0)
    if not found.owner:
        # A word of the program that may mean something else.
        return score - 2.0
    owner = found.owner.rpartition(".")[2]
    score += 1.5 if _CONFIG_OWNER.search(owner) else 0.0
    score += 1.5 if sections and _alike(sections[-1], found.owner) else 0.0
    return score + (0.5 if owner[:1].isupper() or owner in _MAKES else -1.0)


def _alike(section: str, text: str) -> bool:
    """Return whether a class or path is named after a section of the config."""
    return section.replace("_", "").lower()[:6] in text.replace("_", "").lower()
