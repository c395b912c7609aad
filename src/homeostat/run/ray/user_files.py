"""Find the files and packages of plug-ins that ranks and engines import on their own machines.

Rewards, sources and health rules stay with the controller. An algorithm, an engine and a transport
are imported where they compute: by the path of a file, which has to exist there with the same
content, or from a package, which has to be installed there in the same version.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

from homeostat.config.plugins import GROUPS, plugin_named

# Folders of installed packages, which may lie below the folder of a plug-in's file.
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class UserCode:
    """Files that every node needs under the same path, and distributions that it has installed."""

    files: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


def user_code(plugins: Sequence[tuple[str, str]]) -> UserCode:
    """Return what the plug-ins of a recipe are made of; each is a kind of GROUPS and its type."""
    files: dict[str, None] = {}
    packages: dict[str, None] = {}
    for noun, reference in plugins:
        assert noun in GROUPS, f"no kind of plug-in is {noun}"
        module = plugin_named(noun, reference).__module__
        installed = packages_distributions().get(module.partition(".")[0], ())
        packages.update(dict.fromkeys(installed))
        if not installed:
            files.update(dict.fromkeys(_files_of(module)))
    return UserCode(tuple(files), tuple(packages))


def _files_of(module: str) -> Iterator[str]:
    """Yield the file of a module, and the files beside or below it that have been imported."""
    own = getattr(sys.modules.get(module), "__file__", None)
    if own is None:
        return
    own = Path(own).resolve()
    yield str(own)
    for other in list(sys.modules.values()):
        place = getattr(other, "__file__", None)
        if not isinstance(place, str):
            continue
        path = Path(place).resolve()
        is_near = path.is_relative_to(own.parent) and not set(path.parts) & set(_INSTALLED)
        if is_near and path != own and path.suffix == ".py" and not _is_ours(other.__name__):
            yield str(path)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "homeostat"


def digest(file: str) -> str | None:
    """Return the checksum of a file's content; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
