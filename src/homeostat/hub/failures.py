"""Turn what goes wrong with a download into one error that says what to do.

no such name, no access     -> ConfigError: the setting, and the command that logs in
offline, unreachable        -> HubError: the command that fetches it elsewhere
Xet's storage (CAS)         -> HubError: HF_HUB_DISABLE_XET=1
the disk is full            -> HubError: how much is needed, and HF_HOME
"""

from __future__ import annotations

import errno
import os

from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from homeostat.errors import ConfigError, HomeostatError, HubError, Problem
from homeostat.hub.request import Request
from homeostat.observe import format as fmt

# The HTTP library under huggingface_hub is not the same in all its releases. The first base class
# of its errors is that library's, and the base of all errors of a connection.
TRANSPORT_ERRORS: tuple[type[Exception], ...] = (
    HfHubHTTPError.__bases__[0],
    ConnectionError,
    TimeoutError,
)
# What downloading has been seen to raise. Xet's library raises plain RuntimeErrors.
DOWNLOAD_ERRORS: tuple[type[Exception], ...] = (
    *TRANSPORT_ERRORS, HfHubHTTPError, EntryNotFoundError, OSError, RuntimeError, ValueError,
)  # fmt: skip
_ROOM = "Free some room (hf cache), or set HF_HOME to a folder on a larger disk."
_FULL = (errno.ENOSPC, errno.EDQUOT)
_XET_WORDS = ("cas service", "cas client", "xet", "cas::", "data processing error", "cas_client")


def is_offline(error: BaseException) -> bool:
    """Return whether HF_HUB_OFFLINE forbids asking the hub."""
    return isinstance(error, OfflineModeIsEnabled)


def is_unreachable(error: BaseException) -> bool:
    """Return whether the hub gave no answer, so that a copy in the cache may stand in for it."""
    if is_offline(error):
        return True
    if isinstance(error, HfHubHTTPError):
        return _status(error) >= 500 or _status(error) == 429
    return isinstance(error, TRANSPORT_ERRORS)


def as_error(error: BaseException, request: Request) -> HomeostatError:
    """Return our error for one of DOWNLOAD_ERRORS."""
    if isinstance(error, HomeostatError):
        return error
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        # The hub did not answer about one file, which is then looked for in the cache.
        error = error.__cause__
    if isinstance(error, (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)):
        return ConfigError([_no_access(error, request)])
    if isinstance(error, HfHubHTTPError) and _status(error) in (401, 403, 404):
        return ConfigError([_no_access(error, request)])
    if isinstance(error, OSError) and error.errno in _FULL:
        where = constants.HF_HUB_CACHE
        return HubError(f"{_of(request)} was not downloaded: {where} is full. {_ROOM}")
    if _is_xet(error):
        return HubError(
            f"{_of(request)}: the hub's Xet storage (CAS) failed: {_reason(error)}. Files that "
            "arrived are kept. Run the same command with HF_HUB_DISABLE_XET=1, which downloads "
            "them by plain HTTP."
        )
    return unreachable(error, request)


def unreachable(error: BaseException, request: Request) -> HubError:
    """Return the error for a repository that is not in the cache and cannot be downloaded."""
    why = "HF_HUB_OFFLINE is set" if is_offline(error) else _reason(error)
    return HubError(
        f"{_of(request)} is neither a path on this disk ({os.path.abspath(request.name)}) nor in "
        f"the cache ({constants.HF_HUB_CACHE}), and could not be downloaded: {why}. Fetch it where "
        f"there is a connection:\n  {request.command}\n"
        "and run again; files that arrived are kept. On another machine, copy its HF_HOME here."
    )


def full_disk(request: Request, *, needed: int, free: int) -> HubError:
    """Return the error for files that have no room in the cache."""
    sizes = f"{fmt.byte_size(needed)} are to be downloaded, and {fmt.byte_size(free)} are free"
    return HubError(f"{_of(request)}: {sizes} in {constants.HF_HUB_CACHE}. {_ROOM}")


def damaged(request: Request, file: str, *, expected: str, found: str) -> HubError:
    """Return the error for a file that is not what the hub says it is."""
    return HubError(
        f"{_of(request)}: {file} arrived damaged: its checksum is {found[:12]}..., and the hub "
        f"says {expected[:12]}.... It was removed. Run the same command to fetch it again; if that "
        "does not help, a proxy between here and the hub changes files."
    )


def _no_access(error: BaseException, request: Request) -> Problem:
    page = f"{constants.ENDPOINT}/{'datasets/' if request.kind == 'dataset' else ''}{request.name}"
    if isinstance(error, RevisionNotFoundError):
        place = f"{request.setting.rpartition('.')[0]}.revision"
        what = f"{request.name} has no revision {request.revision!r}."
        return Problem(place, what, f"See {page}/commits/main, or leave it out.")
    if isinstance(error, GatedRepoError):
        return Problem(
            request.setting,
            f"{request.name} is gated: its owner wants its conditions accepted.",
            f"Accept them at {page}, and log in: hf auth login",
        )
    return Problem(
        request.setting,
        f"{request.name!r} does not exist on this disk, and the hub ({constants.ENDPOINT}) has no "
        f"{request.kind} of that name, or none that you may see.",
        "Check the spelling. If it is private, log in: hf auth login",
    )


def _is_xet(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return not isinstance(error, HfHubHTTPError) and any(word in text for word in _XET_WORDS)


def _status(error: HfHubHTTPError) -> int:
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def _of(request: Request) -> str:
    return f"{request.setting}: {request.name}"


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return (text if len(text) <= 300 else f"{text[:297]}...").rstrip(".")
