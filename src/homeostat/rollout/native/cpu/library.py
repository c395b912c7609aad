"""The compiled step: built by the machine's own C compiler when it is first wanted, then kept.

    step/ -> cc -> <user's cache>/homeostat/compile/cpu/<digest>.so

The digest is of the source, the compiler, the flags and the processor: what lies there under this
name is what would be built. A library is written beside its place and moved there, so that nobody
ever loads half of one; one that does not load is built again. Where there is no compiler the engine
decodes without it (native/compact.py), and says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from homeostat.errors import EngineError
from homeostat.observe.processor import this_processor
from homeostat.ops.compile_folder import compile_root, require_private

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("step")
FLAGS = (
    "-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
_TIMEOUT_S = 120


def compiler() -> str | None:
    """The C compiler: CC where that is set, else cc, gcc or clang."""
    names = (os.environ.get("CC"), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@cache
def load_library() -> ctypes.CDLL:
    """Builds it where it is not there. Raises EngineError with what the compiler said."""
    command = compiler()
    if command is None:
        raise EngineError("no C compiler was found (cc, gcc or clang, or what CC names)")
    name = f"{_digest(command)}.so"
    try:
        folder = compile_root() / "cpu"
        require_private(folder)
    except OSError as error:
        log.warning("%s cannot hold the compiled step (%s): it is built again", folder, error)
        with tempfile.TemporaryDirectory(prefix="homeostat-compile-") as place:
            return _loaded(_build(command, Path(place) / name))
    if (folder / name).is_file():
        try:
            return _loaded(folder / name)
        except OSError as error:
            log.warning("%s does not load (%s), and is built again", folder / name, error)
    return _loaded(_build(command, folder / name))


def _build(command: str, target: Path) -> Path:
    """Half a library is never seen under its name."""
    half = target.with_suffix(f".{os.getpid()}")
    line = [command, *FLAGS, *_for_this_machine(), str(SOURCE / "burst.c"), "-o", str(half), "-lm"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["nothing"])[0]
            raise EngineError(f"{command} cannot build the compiled step: {said}")
        half.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{command} cannot build the compiled step: {error}") from None
    finally:
        half.unlink(missing_ok=True)
    return target


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.panel_width.restype = library.run_burst.restype = ctypes.c_int64
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
