"""A compile cache (Triton, Inductor) of one's own: never stale, never shared, never half-written.

    <user's cache>/homeostat/compile/<versions>/<n>/{triton,inductor}

The folder is named after all that compiled code depends on (torch, Triton, CUDA, GPU, Python, and
the source of our kernels), so that a new version starts afresh. Runs that are alive at one time
have different <n>, held by a lock that the kernel takes back when the process ends, however it
ends; a later run takes over what an earlier one compiled. Before that, entries which are damaged
(run/wiring/cache_damage.py) are removed: they would be compiled again at worst.

A user's own TRITON_CACHE_DIR or TORCHINDUCTOR_CACHE_DIR is used as it is, and nothing in it is
removed: others may be at work there. What is damaged in it is said.
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
# Where our kernels live, below the package; only files that compile something count.
KERNEL_FOLDERS = ("ops", "models", "rollout", "train")
_COMPILES = (b"import triton", b"torch.compile")
_SHOWN = 3
UNUSED_S = 60 * 24 * 3600

Emit = Callable[..., None]


@dataclass(frozen=True, slots=True)
class CacheView:
    """What can be said of the caches without touching them."""

    folders: Mapping[str, Path]
    users_own: frozenset[str]
    damaged: tuple[Damage, ...]

    def facts(self) -> dict[str, Any]:
        """For the rules: which entries are damaged, and whose business they are."""
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
    """Names what compiled code depends on."""
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
    """Of the source files that hold kernels."""
    package = package or Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder in KERNEL_FOLDERS:
        for file in sorted((package / folder).rglob("*.py")):
            source = file.read_bytes()
            if any(words in source for words in _COMPILES):
                digest.update(f"{file.relative_to(package)} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def view_caches(device: torch.device) -> CacheView:
    """The caches that a run started now would use. Changes nothing."""
    users = _users_own()
    folders = dict(users)
    try:
        place = compile_root() / cache_key(device)
        slot = next(folder for folder in _slots(place) if not _is_held(folder))
        folders |= {name: slot / name for name in VARIABLES if name not in users}
    except OSError as error:
        log.warning("compiled kernels cannot be kept, the run uses a temporary folder: %s", error)
    damaged = [damage for folder in folders.values() for damage in find_damage(folder)]
    return CacheView(folders, frozenset(users), tuple(damaged))


@contextmanager
def own_compile_cache(device: torch.device, *, emit: Emit) -> Iterator[None]:
    """Points both compilers at folders of this run's own, for the length of the block.

    On a CPU nothing is compiled, and nothing is done. `emit` takes an event and its fields.
    """
    if device.type != "cuda":
        yield
        return
    with _root_or_temporary() as root, caches_in(root / cache_key(device), emit=emit):
        yield


@contextmanager
def _root_or_temporary() -> Iterator[Path]:
    """The user's cache, or a temporary folder for a user without a home."""
    try:
        root = compile_root()
    except OSError as error:
        log.warning("kernels are compiled again in every run: %s", error)
        with tempfile.TemporaryDirectory(prefix="homeostat-compile-") as folder:
            yield Path(folder) / "homeostat" / "compile"
        return
    yield root


@contextmanager
def caches_in(place: Path, *, emit: Emit) -> Iterator[Path]:
    """The same, below a folder that is named after the versions."""
    with _held_slot(place) as slot:
        users = _users_own()
        for name, folder in users.items():
            log.info("%s is set: %s is used as it is", VARIABLES[name], folder)
            _tell(find_damage(folder), folder, removed=False, emit=emit)
        own = {name: slot / name for name in VARIABLES if name not in users}
        for folder in own.values():
            _tell(clean(folder), folder, removed=True, emit=emit)
        log.info("compiled kernels are kept in %s", slot)
        with _set({VARIABLES[name]: str(folder) for name, folder in own.items()}):
            yield slot


def clean(folder: Path) -> list[Damage]:
    """Makes the folder, or removes what is damaged in it: that was. What cannot be removed, such
    as another user's files, is set aside with all else that the folder held."""
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
        log.warning("%s is set aside as %s: %s", folder, aside.name, error)
        folder.rename(aside)
        folder.mkdir(mode=0o700)
    return damaged


def _tell(damaged: list[Damage], folder: Path, *, removed: bool, emit: Emit) -> None:
    if not damaged:
        return
    shown = "; ".join(damage.describe() for damage in damaged[:_SHOWN])
    what = "were removed" if removed else "were left: the folder is yours, so delete them"
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
    """A folder that no other live run uses; a temporary one where the user's cache will not do."""
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
        _drop_unused(besides=place)
        for slot in _slots(place):
            slot.mkdir(mode=0o700, exist_ok=True)
            descriptor = _lock(slot)
            if descriptor is not None:
                os.utime(descriptor)
                return slot, descriptor
    except OSError as error:
        log.warning(
            "%s cannot hold compiled kernels (%s): they are compiled again in every run. Set "
            "XDG_CACHE_HOME to a folder of yours on a local disk.",
            place,
            error.strerror or error,
        )
    return None


def _drop_unused(*, besides: Path) -> None:
    """Removes folders of other versions that no run has used for a long time."""
    for lock in besides.parent.glob("*/*/.lock"):
        slot = lock.parent
        if slot.parent == besides:
            continue
        if time.time() - lock.stat().st_mtime > UNUSED_S and not _is_held(slot):
            log.info("%s was not used for long, and is removed", slot)
            shutil.rmtree(slot)
            if not any(slot.parent.iterdir()):
                slot.parent.rmdir()


def _lock(slot: Path) -> int | None:
    """Held until the descriptor is closed; None where another process holds it."""
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
    """Environment variables that were not set before, for the length of the block."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
