"""Find the entries of a compile cache that cannot be trusted, by looking at the files only.

An entry is a file or folder directly below the cache folder: one kernel (Triton), one kind or shard
of artifacts (Inductor). One bad file makes its whole entry suspect, because its files refer to each
other. Nothing is loaded: unpickling would execute code, and a truncated library would crash the
process.

Two kinds of damage are looked for: what a killed process or a full disk leaves behind (empty and
truncated files, temporary files of unfinished writes, missing members of a group), and what does
not belong to this user (files of another user, links to other places).
"""

from __future__ import annotations

import ast
import os
import stat
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from homeostat.json_text import parse_json

_ELF = b"\x7fELF"
_PICKLE = b"\x80"
_PICKLE_STOP = b"."
# Lock files are empty on purpose.
_LOCK_SUFFIX = ".lock"
_GROUP_PREFIX = "__grp__"
# The entry of every Triton kernel has a file of this intermediate form; helper libraries have none.
_KERNEL_SUFFIX = ".ttir"


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged entry of a cache, and what is wrong with it."""

    entry: Path
    why: str

    def describe(self) -> str:
        return f"{self.entry.name}: {self.why}"


def find_damage(cache: Path) -> list[Damage]:
    """Return the damaged entries of a cache folder; none if the folder does not exist."""
    try:
        entries = sorted(cache.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [Damage(cache, f"cannot be read ({error.strerror})")]
    found = ((entry, _entry_damage(entry)) for entry in entries)
    return [Damage(entry, why) for entry, why in found if why is not None]


def _entry_damage(entry: Path) -> str | None:
    try:
        for path in _walk(entry):
            why = _path_damage(path)
            if why is not None:
                inside = path.relative_to(entry.parent)
                return why if path == entry else f"{inside.relative_to(entry.name)} {why}"
        return _group_damage(entry)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _walk(entry: Path) -> Iterator[Path]:
    yield entry
    if entry.is_dir() and not entry.is_symlink():
        for inner in sorted(entry.iterdir()):
            yield from _walk(inner)


def _path_damage(path: Path) -> str | None:
    status = path.lstat()
    if status.st_uid != os.getuid():
        return f"belongs to another user (id {status.st_uid})"
    if stat.S_ISLNK(status.st_mode):
        return "is a link to another place"
    if path.name.startswith("tmp.pid_") or path.name.endswith(".tmp"):
        return "is left over from a write that never ended"
    if stat.S_ISDIR(status.st_mode) or path.name.endswith(_LOCK_SUFFIX):
        return None
    if status.st_size == 0:
        return None if path.name == "__init__.py" else "is empty"
    return _content_damage(path, status.st_size)


def _content_damage(path: Path, size: int) -> str | None:
    with open(path, "rb") as stream:
        head = stream.read(64)
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
    if head.startswith(_ELF):
        return _elf_damage(head, size)
    look = _BY_SUFFIX.get(path.suffix)
    if look is not None:
        return look(path)
    # Inductor's pickles have no suffix.
    if not path.suffix and head.startswith(_PICKLE) and last != _PICKLE_STOP:
        return "is cut off"
    return None


def _elf_damage(head: bytes, size: int) -> str | None:
    """Check that the tables of segments and sections lie inside the file: one of them is last."""
    if len(head) < 64:
        return "is cut off"
    segments, sections = struct.unpack_from("<QQ", head, 32)
    segment_size, num_segments, section_size, num_sections = struct.unpack_from("<HHHH", head, 54)
    end = max(segments + segment_size * num_segments, sections + section_size * num_sections)
    return "is cut off" if end > size else None


def _json_damage(path: Path) -> str | None:
    try:
        parse_json(path.read_bytes())
    except ValueError:
        return "is not valid JSON"
    return None


def _python_damage(path: Path) -> str | None:
    with warnings.catch_warnings():
        # Generated code may cause warnings, which are of no interest here.
        warnings.simplefilter("ignore")
        try:
            ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return "is not valid Python"
    return None


def _not_a_library(_: Path) -> str:
    return "is not a compiled library"


_BY_SUFFIX: dict[str, Callable[[Path], str | None]] = {
    ".json": _json_damage,
    ".best_config": _json_damage,
    ".py": _python_damage,
    ".so": _not_a_library,
    ".cubin": _not_a_library,
}


def _group_damage(entry: Path) -> str | None:
    """Check that a Triton kernel has all of its files: the list of them is written last."""
    if not entry.is_dir():
        return None
    groups = sorted(entry.glob(f"{_GROUP_PREFIX}*.json"))
    if not groups and any(entry.glob(f"*{_KERNEL_SUFFIX}")):
        return "was never finished: it has no list of its files"
    for group in groups:
        listed = parse_json(group.read_bytes())
        members = listed.get("child_paths") if isinstance(listed, dict) else None
        if not isinstance(members, dict):
            return f"{group.name} lists no files"
        for name, path in members.items():
            if Path(str(path)).parent.resolve() != entry.resolve():
                return f"{name} is listed in another folder: the cache was moved or copied"
            if not (entry / name).is_file():
                return f"lacks {name}"
    return None
