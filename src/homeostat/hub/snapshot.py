"""Fetch files of a repository into the hub's cache, once for all processes of this machine.

    revision -> commit -> recorded as complete? -> the folder, without asking the hub
                       else lock -> choose files -> room on disk? -> download -> verify -> record

A process that waits for the lock finds the record of the one that had it. Every file is compared
with the checksum that the hub gives for it. If the hub cannot be reached, a copy in the cache is
used, and said so.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants, hf_hub_download

from homeostat.config.hub_names import is_commit
from homeostat.data.dataset_folder import files_below
from homeostat.errors import HubError
from homeostat.hub import failures
from homeostat.hub.progress import Show
from homeostat.hub.record import (
    cached_commit,
    has_size,
    is_recorded,
    record,
    snapshot_folder,
    state_folder,
)
from homeostat.hub.request import Request
from homeostat.hub.transfer import RemoteFile, download, own_bars_only

MAX_WAIT_S = 6 * 3600.0
SECONDS_BETWEEN_TRIES = 1.0
MAX_TEXT_BYTES = 10_000_000

log = logging.getLogger(__name__)

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at a commit, by name."""

    commit: str
    files: dict[str, RemoteFile]


def fetch(request: Request, *, show: Show, tell: Tell) -> Path:
    """Return the folder of the cache that holds the files of a request, downloaded if need be.

    Raises ConfigError for a name that there is not, and HubError for a failed download.
    """
    commit = request.revision if is_commit(request.revision) else None
    if commit is not None and is_recorded(request, commit):
        return snapshot_folder(request, commit)
    try:
        listing = _list(request)
    except failures.DOWNLOAD_ERRORS as error:
        return _from_cache(request, error, tell)
    if is_recorded(request, listing.commit):
        return snapshot_folder(request, listing.commit)
    try:
        with _locked(request, tell), own_bars_only():
            if not is_recorded(request, listing.commit):
                _download(request, listing, show)
    except failures.DOWNLOAD_ERRORS as error:
        raise failures.as_error(error, request) from None
    return snapshot_folder(request, listing.commit)


def _list(request: Request) -> Listing:
    info = HfApi().repo_info(
        request.name, revision=request.revision, repo_type=request.kind, files_metadata=True
    )
    assert info.sha is not None, "the hub gives a commit for every revision"
    files = {}
    for one in getattr(info, "siblings", None) or ():
        sha256 = one.lfs.sha256 if one.lfs is not None else None
        file = RemoteFile(one.rfilename, one.size or 0, sha256=sha256, git_sha1=one.blob_id)
        files[file.name] = file
    return Listing(info.sha, files)


def _from_cache(request: Request, error: BaseException, tell: Tell) -> Path:
    """Return a copy in the cache, if it is there and the hub only gave no answer."""
    commit = request.revision if is_commit(request.revision) else cached_commit(request)
    folder = snapshot_folder(request, commit) if commit is not None else None
    if not failures.is_unreachable(error) or commit is None or folder is None:
        raise failures.as_error(error, request) from None
    if not is_recorded(request, commit):
        if not folder.is_dir():
            raise failures.as_error(error, request) from None
        # Fetched by another program. What is missing is noticed where it is opened.
        request.choose(files_below(folder), lambda name: _text(folder / name))
    why = "offline" if failures.is_offline(error) else "the hub cannot be reached"
    tell(f"{request.name}: {why}; the copy of commit {commit[:12]} in the cache is used.")
    return folder


@contextmanager
def _locked(request: Request, tell: Tell) -> Iterator[None]:
    """Hold the repository's lock: the system frees it when a process ends, however it ends."""
    folder = state_folder(request)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "download.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(f"another process downloads {request.name}: waiting for it.")
        try:
            lock.acquire(timeout=MAX_WAIT_S, poll_interval=SECONDS_BETWEEN_TRIES)
        except Timeout:
            raise HubError(
                f"{request.setting}: another process has downloaded {request.name} for "
                f"{MAX_WAIT_S / 3600:.0f} hours (its lock is {lock.lock_file}). End it, and run "
                "again."
            ) from None
    try:
        yield
    finally:
        lock.release()


def _download(request: Request, listing: Listing, show: Show) -> None:
    commit, folder = listing.commit, snapshot_folder(request, listing.commit)

    def fetch_one(name: str, *, again: bool = False) -> Path:
        return Path(
            hf_hub_download(
                request.name,
                name,
                repo_type=request.kind,
                revision=commit,
                force_download=again,
            )
        )

    def read_text(name: str) -> str | None:
        file = listing.files.get(name)
        if file is None or file.size > MAX_TEXT_BYTES:
            return None
        return _text(fetch_one(name))

    chosen = [listing.files[name] for name in request.choose(list(listing.files), read_text)]
    missing = [file for file in chosen if not has_size(folder / file.name, file.size)]
    needed = sum(file.size for file in missing)
    Path(constants.HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(constants.HF_HUB_CACHE).free
    if needed > free:
        raise failures.full_disk(request, needed=needed, free=free)
    if missing:
        blobs = folder.parent.parent / "blobs"
        download(missing, fetch_one, request=request, blobs=blobs, show=show)
    record(request, commit, {file.name: file.size for file in chosen})


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
