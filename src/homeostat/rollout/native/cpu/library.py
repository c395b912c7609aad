"""The compiled step: built by the machine's C compiler when it is first needed, then cached.

    step/ -> cc -> <user's cache>/homeostat/compile/cpu/<digest>-<checksum>.so

The digest is of the source, the compiler, the flags and the processor: a library of this name is
the one that would be built. The checksum is of the library's own bytes. It is compared before the
library is loaded, because a file that lost its end (a power cut, a full disk) would end the process
by SIGBUS. A damaged library, or one that another user could have written, is built again.

Where the cache does not allow loading code from it (mounted noexec, read-only), the library is
loaded from a temporary folder. If that fails too, or there is no compiler, the engine decodes
without the compiled step (native/compact.py). The log and `check` report either case once.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from homeostat.errors import EngineError
from homeostat.observe.durable import sha256_of, sync_file, sync_folder
from homeostat.observe.processor import this_processor
from homeostat.ops.compile_folder import compile_root, require_private

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("step")
FLAGS = (
    "-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_TIMEOUT_S = 120


def compiler() -> str | None:
    """Find the C compiler: CC if that is set, else cc, gcc or clang."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def load_library() -> ctypes.CDLL:
    """Load the library, built first if need be. Raises EngineError with what stands in the way."""
    command = compiler()
    if command is None:
        raise EngineError("no C compiler was found (cc, gcc or clang, or what CC names)")
    digest = _digest(command)
    try:
        folder = compile_root() / "cpu"
        require_private(folder)
        path = kept_library(folder, digest)
        if path is None:
            _require_writable(folder)
            path = _build(command, folder, digest)
    except OSError as error:
        log.warning("the compiled step cannot be kept (%s): every run builds it again", error)
        with _temporary_folder() as place:
            return _loaded(_build(command, Path(place), digest))
    try:
        return _loaded(path)
    except EngineError as error:
        # The usual reason is a cache on a file system that is mounted noexec.
        log.warning("%s: a copy in a temporary folder is tried", error)
    with _temporary_folder() as place:
        return _loaded(Path(shutil.copy(path, place)))


def _require_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, "the folder cannot be written to", str(folder))


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="homeostat-compile-")
    except OSError as error:
        raise EngineError(f"the compiled step can be kept nowhere: {error}") from None


def kept_library(folder: Path, digest: str) -> Path | None:
    """Find the library of an earlier run if it is whole and ours; remove others of this name."""
    for path in sorted(folder.glob(f"{digest}*.so")):
        why = _flaw(path)
        if why is None:
            return path
        log.warning("%s %s: it is built again", path, why)
        path.unlink()
    return None


def _flaw(path: Path) -> str | None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "is no plain file"
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "could have been written by another user"
    if path.stem.rpartition("-")[2] != sha256_of(path):
        return "is damaged: its checksum is not the one in its name"
    return None


def _build(command: str, folder: Path, digest: str) -> Path:
    """Build the library beside its place and move it there once it is whole on the disk."""
    half = folder / f"{digest}.{os.getpid()}"
    line = [command, *FLAGS, *_for_this_machine(), str(SOURCE / "burst.c"), "-o", str(half), "-lm"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["nothing"])[0]
            raise EngineError(f"{command} cannot build the compiled step: {said}")
        half.chmod(0o700)
        sync_file(half)
        target = folder / f"{digest}-{sha256_of(half)}.so"
        half.replace(target)
        sync_folder(folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{command} cannot build the compiled step: {error}") from None
    finally:
        half.unlink(missing_ok=True)
    return target


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.panel_width.restype = library.run_burst.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        raise EngineError(f"the compiled step cannot be loaded ({error})") from None
    library.run_burst.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library


def _for_this_machine() -> tuple[str, ...]:
    return ("-mcpu=native",) if platform.machine() in ("arm64", "aarch64") else ("-march=native",)


def _digest(command: str) -> str:
    try:
        line = [command, "--version"]
        said = subprocess.run(line, capture_output=True, timeout=_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{command} cannot be run: {error}") from None
    sources = [(file.name, file.read_bytes()) for file in sorted(SOURCE.iterdir())]
    processor = this_processor()
    seen = (processor.describe(), sorted(processor.features))
    parts = repr((sources, said, FLAGS, _for_this_machine(), seen))
    return hashlib.sha256(parts.encode()).hexdigest()[:24]
