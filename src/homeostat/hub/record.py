"""Records of which files of a snapshot were downloaded and verified, and how large they are.

A folder in the hub's cache does not say whether it is complete: a killed download leaves a part of
its files. With a record, a run that is resumed, or started offline, knows without asking the hub.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from homeostat.config.hub_names import is_commit
from homeostat.hub.request import Request
from homeostat.json_text import parse_json
from homeostat.observe.durable import write_atomically

log = logging.getLogger(__name__)


def snapshot_folder(request: Request, commit: str) -> Path:
    """Return the folder of the cache for a commit, whether it exists or not."""
    return Path(constants.HF_HUB_CACHE) / request.folder_name / "snapshots" / commit


def state_folder(request: Request) -> Path:
    """Return our own folder for a repository: its records and its lock."""
    return Path(constants.HF_HOME) / "homeostat" / request.folder_name


def is_recorded(request: Request, commit: str) -> bool:
    """Return whether the files of a request were downloaded completely and are still there."""
    files = _read(request, commit).get(request.part)
    if not isinstance(files, dict):
        return False
    folder = snapshot_folder(request, commit)
    return bool(files) and all(has_size(folder / name, size) for name, size in files.items())


def has_size(file: Path, size: Any) -> bool:
    """Return whether a file exists and has this many bytes."""
    try:
        return file.stat().st_size == size
    except OSError:
        return False


def record(request: Request, commit: str, files: Mapping[str, int]) -> None:
    """Note that these files of a request are complete."""
    place = _place(request, commit)
    ref = _ref(request)
    parts = _read(request, commit) | {request.part: dict(files)}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, json.dumps(parts, indent=1) + "\n")
        if not is_commit(request.revision):
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(ref, commit)
    except OSError as error:
        # Without a record the hub is asked again next time, which is no reason to stop a run.
        log.info("%s was not written: %s", place, error)


def cached_commit(request: Request) -> str | None:
    """Return the commit that a branch or tag had when it was last downloaded."""
    try:
        return _ref(request).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _ref(request: Request) -> Path:
    """Return the file of the cache with the commit of a branch or tag."""
    folder = Path(constants.HF_HUB_CACHE) / request.folder_name / "refs"
    return folder / (request.revision or constants.DEFAULT_REVISION)


def _place(request: Request, commit: str) -> Path:
    return state_folder(request) / f"{commit}.json"


def _read(request: Request, commit: str) -> dict[str, Any]:
    try:
        found = parse_json(_place(request, commit).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
