"""Which entries of a compile cache cannot be trusted, by looking at files alone.

An entry is what lies directly in the cache folder: one kernel (Triton), one kind or shard of
artifacts (Inductor). One bad file makes its whole entry suspect, for its files name each other.
Nothing is loaded: a pickle would run what it holds, and a truncated library would end the process.

Looked for: what a killed process or a full disk leaves (empty and cut files, leftovers of writes
that were never finished, members of a group that are not there), and what is not ours (files of
another user, links to elsewhere).
"""

from __future__ import annotations

import ast
import json
import os
import stat
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ELF = b"\x7fELF"
_PICKLE = b"\x80"
_PICKLE_STOP = b"."
# Files that are meant to be empty.
_LOCK_SUFFIX = ".lock"
_GROUP_PREFIX = "__grp__"
# The intermediate form that every Triton kernel's entry has; helper libraries have none.
_KERNEL_SUFFIX = ".ttir"


@dataclass(frozen=True, slots=True)
class Damage:
    """An entry of a cache, and what is wrong with it."""

    entry: Path
    why: str

    def describe(self) -> str:
        return f"{self.entry.name}: {self.why}"


def find_damage(cache: Path) -> list[Damage]:
    """Damaged entries of a cache folder; none where there is no such folder."""
    try:
        entries = sorted(cache.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [Damage(cache, f"cannot be read ({error.strerror})")]
    found = ((entry, _entry_trouble(entry)) for entry in entries)
    return [Damage(entry, why) for entry, why in found if why is not None]


def _entry_trouble(entry: Path) -> str | None:
    try:
        for path in _walk(entry):
            why = _path_trouble(path)
            if why is not None:
                inside = path.relative_to(entry.parent)
                return why if path == entry else f"{inside.relative_to(entry.name)} {why}"
        return _group_trouble(entry)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _walk(entry: Path) -> Iterator[Path]:
    yield entry
    if entry.is_dir() and not entry.is_symlink():
        for inner in sorted(entry.iterdir()):
            yield from _walk(inner)


def _path_trouble(path: Path) -> str | None:
    status = path.lstat()
    if status.st_uid != os.getuid():
        return f"belongs to another user (id {status.st_uid})"
    if stat.S_ISLNK(status.st_mode):
        return "is a link to another place"
    if path.name.startswith("tmp.pid_") or path.name.endswith(".tmp"):
        return "is left of a write that never ended"
    if stat.S_ISDIR(status.st_mode) or path.name.endswith(_LOCK_SUFFIX):
        return None
    if status.st_size == 0:
        return None if path.name == "__init__.py" else "is empty"
    return _content_trouble(path, status.st_size)


def _content_trouble(path: Path, size: int) -> str | None:
    with open(path, "rb") as stream:
        head = stream.read(64)
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
    if head.startswith(_ELF):
        return _elf_trouble(head, size)
    look = _BY_SUFFIX.get(path.suffix)
    if look is not None:
        return look(path)
    # Inductor's pickles have no suffix.
    if not path.suffix and head.startswith(_PICKLE) and last != _PICKLE_STOP:
        return "is cut off"
    return None


def _elf_trouble(head: bytes, size: int) -> str | None:
    """The tables of segments and sections, of which one comes last, must lie inside the file."""
    if len(head) < 64:
        return "is cut off"
    segments, sections = struct.unpack_from("<QQ", head, 32)
    segment_size, num_segments, section_size, num_sections = struct.unpack_from("<HHHH", head, 54)
    end = max(segments + segment_size * num_segments, sections + section_size * num_sections)
    return "is cut off" if end > size else None


def _json_trouble(path: Path) -> str | None:
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return "is not whole JSON"
    return None


def _python_trouble(path: Path) -> str | None:
    with warnings.catch_warnings():
        # Generated code may deserve some, and nobody is to read them here.
        warnings.simplefilter("ignore")
        try:
            ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return "is not whole Python"
    return None


def _not_a_library(_: Path) -> str:
    return "is no compiled library"


_BY_SUFFIX: dict[str, Callable[[Path], str | None]] = {
    ".json": _json_trouble,
    ".best_config": _json_trouble,
    ".py": _python_trouble,
    ".so": _not_a_library,
    ".cubin": _not_a_library,
}


def _group_trouble(entry: Path) -> str | None:
    """A Triton kernel is a group of files, whose list is written last."""
    if not entry.is_dir():
        return None
    groups = sorted(entry.glob(f"{_GROUP_PREFIX}*.json"))
    if not groups and any(entry.glob(f"*{_KERNEL_SUFFIX}")):
        return "was never finished: it has no list of its files"
    for group in groups:
        listed = json.loads(group.read_bytes())
        members = listed.get("child_paths") if isinstance(listed, dict) else None
        if not isinstance(members, dict):
            return f"{group.name} lists no files"
        for name, path in members.items():
            if Path(str(path)).parent.resolve() != entry.resolve():
                return f"{name} is listed at another place: the folder was moved or copied"
            if not (entry / name).is_file():
                return f"lacks {name}"
    return None
