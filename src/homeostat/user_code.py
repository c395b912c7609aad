"""Import what a recipe names by its import path. Standard library only: reward workers start fast.

    package.module:name    imported from wherever Python finds it, or from the working folder
    folder/file.py:name    the file itself; its folder is searched for what it imports

The module of a file is known under a name from which any process can find the file again, so that
objects of its classes can be sent to worker processes (workers/wire.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from homeostat.errors import UserCodeError

# The names of modules that were loaded from a file; what follows is the file's path in hex.
FILE_MODULE = "homeostat_file_"


def is_reference(text: str) -> bool:
    """Return whether a text is an import path, and not the name of something built in."""
    place, colon, name = text.rpartition(":")
    return bool(colon) and bool(place) and name.isidentifier()


def is_file(reference: str) -> bool:
    """Return whether an import path names a file, and not a module."""
    return reference.rpartition(":")[0].endswith(".py")


def absolute(reference: str, *, folder: Path) -> str:
    """Return an import path whose file is named in full.

    A relative path is looked for in the folder, then in the current one.
    """
    if not is_reference(reference) or not is_file(reference):
        return reference
    place, _, name = reference.rpartition(":")
    found = [Path(start, place).resolve() for start in (folder, Path())]
    return f"{next((file for file in found if file.is_file()), found[0])}:{name}"


def load_object(reference: str, *, what: str = "name") -> Any:
    """Return the object that an import path names. Raises UserCodeError if there is none.

    What the module itself raises when it is imported is raised here unchanged.
    """
    place, _, name = reference.rpartition(":")
    module = load_file(Path(place).resolve()) if is_file(reference) else _load_module(place)
    if not hasattr(module, name):
        raise UserCodeError(f"{reference}: {place} has no {what} {name!r}")
    return getattr(module, name)


def module_named(name: str) -> ModuleType:
    """Return the module that another process calls by this name."""
    if name.startswith(FILE_MODULE) and name not in sys.modules:
        file = Path(os.fsdecode(bytes.fromhex(name.removeprefix(FILE_MODULE))))
        sys.modules[name] = load_file(file)
    return importlib.import_module(name)


def load_file(file: Path) -> ModuleType:
    """Import a file as if it were run as a script: its own folder is searched for imports.

    A file that has changed is imported again, as the cells of a notebook expect.
    """
    try:
        changed = file.stat().st_mtime_ns
    except OSError:
        text = f"there is no file {file} (relative paths start at the working folder)"
        raise UserCodeError(text) from None
    return _loaded_file(file, changed)


@lru_cache
def _loaded_file(file: Path, changed: int) -> ModuleType:
    if (folder := str(file.parent)) not in sys.path:
        sys.path.insert(0, folder)
    name = FILE_MODULE + os.fsencode(file).hex()
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Not by its loader: stored bytecode counts as fresh if a file changed within the same second.
    exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    return module


def _load_module(name: str) -> ModuleType:
    # The script `homeostat` does not have the working folder on its path, and people expect it.
    if (folder := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A missing package that the user's module imports is another error, with its own message.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UserCodeError(
            f"there is no module {name!r}: start homeostat in the folder that holds it, install "
            "it, or write the path of its file (folder/file.py:name)"
        ) from error
