"""Download several files at once and verify each: four threads, one of which shows the progress.

The threads are daemons, so that Ctrl-C ends the process at once. Files that are complete stay in
the cache.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from homeostat.errors import HomeostatError
from homeostat.hub import failures
from homeostat.hub.progress import Show
from homeostat.hub.request import Request

NUM_THREADS = 4
SECONDS_BETWEEN_LOOKS = 0.25
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on the hub. Large ones have a sha256, small ones the hash that git gives them."""

    name: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


class FetchOne(Protocol):
    """Download a file, or take it from the cache unless it is to be fetched `again`."""

    def __call__(self, name: str, *, again: bool = False) -> Path: ...


def download(
    files: Sequence[RemoteFile], fetch_one: FetchOne, *, request: Request, blobs: Path, show: Show
) -> None:
    """Download files and compare their checksums. Raises the first error of any of them."""
    todo: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
    for file in files:
        todo.put(file)
    done: queue.SimpleQueue[RemoteFile | HomeostatError] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        _take_all(todo, done, stop, fetch_one=fetch_one, request=request)

    for _ in range(min(NUM_THREADS, len(files))):
        threading.Thread(target=work, daemon=True, name="download").start()
    try:
        _await_all(len(files), done, blobs=blobs, total=sum(f.size for f in files), show=show)
    finally:
        stop.set()


def _take_all(
    todo: queue.SimpleQueue[RemoteFile],
    done: queue.SimpleQueue[RemoteFile | HomeostatError],
    stop: threading.Event,
    *,
    fetch_one: FetchOne,
    request: Request,
) -> None:
    """Fetch one file after the other until none is left, or one fails."""
    while not stop.is_set():
        try:
            file = todo.get_nowait()
        except queue.Empty:
            return
        try:
            _fetch_verified(file, fetch_one, request)
        # Xet's library and those below it raise what they like, and a thread that ends without a
        # word would be waited for.
        except Exception as error:
            done.put(failures.as_error(error, request))
            return
        done.put(file)


def _await_all(
    count: int,
    done: queue.SimpleQueue[RemoteFile | HomeostatError],
    *,
    blobs: Path,
    total: int,
    show: Show,
) -> None:
    whole = 0
    show(0, total)
    while count:
        try:
            one = done.get(timeout=SECONDS_BETWEEN_LOOKS)
        except queue.Empty:
            show(min(whole + _partial_bytes(blobs), total), total)
            continue
        if isinstance(one, HomeostatError):
            raise one
        count, whole = count - 1, whole + one.size
        show(whole, total)


def _partial_bytes(blobs: Path) -> int:
    """Return the size of the files that are being downloaded."""
    sizes = []
    for file in blobs.glob("*.incomplete"):
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:
            continue
    return sum(sizes)


def _fetch_verified(file: RemoteFile, fetch_one: FetchOne, request: Request) -> None:
    """Fetch a file. One that is there with another size, or arrives damaged, is not kept."""
    path = fetch_one(file.name)
    if path.stat().st_size != file.size:
        path = fetch_one(file.name, again=True)
    expected, found = _checksums(file, path)
    if expected is not None and expected != found:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise failures.damaged(request, file.name, expected=expected, found=found)


def _checksums(file: RemoteFile, path: Path) -> tuple[str | None, str]:
    """Return the checksum that the hub gives for a file, and that of the file here."""
    if file.sha256 is not None:
        return file.sha256, _digest(path, hashlib.sha256())
    size = path.stat().st_size
    # What git calls a file: the hash of a short header and the content. Not a matter of security.
    own = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    return file.git_sha1, _digest(path, own)


def _digest(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def own_bars_only() -> Iterator[None]:
    """Keep huggingface_hub from drawing a bar for every file beside ours."""
    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not was_disabled:
            enable_progress_bars()
