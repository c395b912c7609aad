"""Give each run its own compile cache (Triton, Inductor), without stale or half-written entries.

    <user's cache>/homeostat/compile/<versions>/<n>/{triton,inductor}

The folder is named after everything that compiled code depends on (torch, Triton, CUDA, GPU, Python
and the source of our kernels), so a new version starts with an empty cache. Runs that are alive at
the same time have different <n>, each held by a lock that the operating system releases when the
process ends, however it ends. A later run reuses what an earlier one compiled. Damaged entries
(run/wiring/cache_damage.py) are removed first: at worst they have to be compiled again.

A TRITON_CACHE_DIR or TORCHINDUCTOR_CACHE_DIR that the user has set is used as it is. Nothing in it
is removed, because other processes may be using it; damaged entries are reported.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from homeostat.ops.compile_folder import compile_root, require_private
from homeostat.run.wiring.cache_damage import Damage, find_damage

log = logging.getLogger(__name__)

VARIABLES = {"triton": "TRITON_CACHE_DIR", "inductor": "TORCHINDUCTOR_CACHE_DIR"}
# Folders of the package that hold our kernels; only files that compile something count.
KERNEL_FOLDERS = ("ops", "models", "rollout", "train")
_COMPILES = (b"import triton", b"torch.compile")
# Number of damaged entries that a log line names.
_SHOWN = 3
# A cache of other versions is removed after it was not used for so long.
UNUSED_S = 60 * 24 * 3600

Emit = Callable[..., None]


@dataclass(frozen=True, slots=True)
class CacheView:
    """The caches that a run would use, and their damaged entries. `users_own`: set by the user."""

    folders: Mapping[str, Path]
    users_own: frozenset[str]
    damaged: tuple[Damage, ...]

    def facts(self) -> dict[str, Any]:
        """Return the damaged entries for the rules, and which of them the user has to remove."""
        return {
            "folders": {name: str(folder) for name, folder in self.folders.items()},
            "damaged": [damage.describe() for damage in self.damaged],
            "damaged_by_user": [
                str(damage.entry)
                for damage in self.damaged
                if any(self.folders[name] in damage.entry.parents for name in self.users_own)
            ],
        }


def cache_key(device: torch.device) -> str:
    """Return a folder name that changes with everything that compiled code depends on."""
    gpu = ""
    if device.type == "cuda":
        gpu = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    parts = (torch.__version__, _triton_version(), torch.version.cuda, gpu, sys.version)
    digest = hashlib.sha256(repr((*parts, kernel_digest())).encode()).hexdigest()
    return f"torch-{torch.__version__}-{digest[:12]}"


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "absent"


def kernel_digest(package: Path | None = None) -> str:
    """Return a digest of the source files that hold kernels."""
    package = package or Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder in KERNEL_FOLDERS:
        for file in sorted((package / folder).rglob("*.py")):
            source = file.read_bytes()
            if any(words in source for words in _COMPILES):
                digest.update(f"{file.relative_to(package)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def view_caches(device: torch.device) -> CacheView:
    """Return the caches that a run would use if it started now. Changes nothing."""
    users = _users_own()
    folders = dict(users)
    try:
        place = compile_root() / cache_key(device)
        slot = next(folder for folder in _slots(place) if not _is_held(folder))
        folders |= {name: slot / name for name in VARIABLES if name not in users}
    except OSError as error:
        log.warning("compiled kernels cannot be kept; the run uses a temporary folder: %s", error)
    damaged = [damage for folder in folders.values() for damage in find_damage(folder)]
    return CacheView(folders, frozenset(users), tuple(damaged))


@contextmanager
def own_compile_cache(device: torch.device, *, emit: Emit) -> Iterator[None]:
    """Make both compilers use folders that belong to this run, for the duration of the block.

    Does nothing on a CPU, where nothing is compiled. `emit` takes an event and its fields.
    """
    if device.type != "cuda":
        yield
        return
    with _root_or_temporary() as root, caches_in(root / cache_key(device), emit=emit):
        yield


@contextmanager
def _root_or_temporary() -> Iterator[Path]:
    """Yield the folder of compile caches, or a temporary one if the user has no home folder."""
    try:
        root = compile_root()
    except OSError as error:
        log.warning("every run has to compile its kernels again: %s", error)
        with tempfile.TemporaryDirectory(prefix="homeostat-compile-") as folder:
            yield Path(folder) / "homeostat" / "compile"
        return
    yield root


@contextmanager
def caches_in(place: Path, *, emit: Emit) -> Iterator[Path]:
    """Make both compilers use folders below `place`, which is named after the versions."""
    with _held_slot(place) as slot:
        users = _users_own()
        for name, folder in users.items():
            log.info("%s is set: %s is used as it is", VARIABLES[name], folder)
            _report(find_damage(folder), folder, removed=False, emit=emit)
        own = {name: slot / name for name in VARIABLES if name not in users}
        for folder in own.values():
            _report(clean(folder), folder, removed=True, emit=emit)
        log.info("compiled kernels are kept in %s", slot)
        with _set({VARIABLES[name]: str(folder) for name, folder in own.items()}):
            yield slot


def clean(folder: Path) -> list[Damage]:
    """Create the folder, or remove its damaged entries. Return what was damaged.

    If an entry cannot be removed, because it is another user's for example, the whole folder is
    renamed and a new one is created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    damaged = find_damage(folder)
    try:
        for damage in damaged:
            if damage.entry.is_dir() and not damage.entry.is_symlink():
                shutil.rmtree(damage.entry)
            else:
                damage.entry.unlink()
    except OSError as error:
        aside = folder.with_name(f"{folder.name}.aside-{time.time_ns()}")
        log.warning("%s is renamed to %s: %s", folder, aside.name, error)
        folder.rename(aside)
        folder.mkdir(mode=0o700)
    return damaged


def _report(damaged: list[Damage], folder: Path, *, removed: bool, emit: Emit) -> None:
    if not damaged:
        return
    shown = "; ".join(damage.describe() for damage in damaged[:_SHOWN])
    what = "were removed" if removed else "were kept: you chose the folder, so delete them yourself"
    log.warning("%s: %d damaged entries %s (%s)", folder, len(damaged), what, shown)
    emit(
        "compile_cache_damaged",
        folder=str(folder),
        entries=[damage.describe() for damage in damaged],
        removed=removed,
    )


def _users_own() -> dict[str, Path]:
    found = {name: os.environ.get(variable) for name, variable in VARIABLES.items()}
    return {name: Path(folder) for name, folder in found.items() if folder}


def _slots(place: Path) -> Iterator[Path]:
    return (place / str(number) for number in itertools.count())


@contextmanager
def _held_slot(place: Path) -> Iterator[Path]:
    """Yield a folder that no other live run uses; a temporary one if none can be locked."""
    taken = _take_slot(place)
    if taken is None:
        with tempfile.TemporaryDirectory(prefix="homeostat-compile-") as folder:
            yield Path(folder)
        return
    slot, descriptor = taken
    try:
        yield slot
    finally:
        os.close(descriptor)


def _take_slot(place: Path) -> tuple[Path, int] | None:
    try:
        require_private(place)
        _drop_unused(keep=place)
        for slot in _slots(place):
            slot.mkdir(mode=0o700, exist_ok=True)
            descriptor = _lock(slot)
            if descriptor is not None:
                os.utime(descriptor)
                return slot, descriptor
    except OSError as error:
        log.warning(
            "%s cannot hold compiled kernels (%s): every run has to compile them again. Set "
            "XDG_CACHE_HOME to a folder that you own, on a local disk.",
            place,
            error.strerror or error,
        )
    return None


def _drop_unused(*, keep: Path) -> None:
    """Remove folders of other versions that no run has used for a long time."""
    for lock in keep.parent.glob("*/*/.lock"):
        slot = lock.parent
        if slot.parent == keep:
            continue
        if time.time() - lock.stat().st_mtime > UNUSED_S and not _is_held(slot):
            log.info("%s was not used for a long time and is removed", slot)
            shutil.rmtree(slot)
            if not any(slot.parent.iterdir()):
                slot.parent.rmdir()


def _lock(slot: Path) -> int | None:
    """Lock a folder until the returned descriptor is closed; None if another process holds it."""
    descriptor = os.open(slot / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_held(slot: Path) -> bool:
    if not (slot / ".lock").is_file():
        return False
    descriptor = _lock(slot)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which were not set before, for the duration of the block."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
