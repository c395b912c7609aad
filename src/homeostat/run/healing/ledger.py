"""State of healing of a run that goes back, on disk until a checkpoint holds it.

    rollback -> healing.json {step, healing} -> the steps after that one -> the next checkpoint

The checkpoint that a run goes back to was saved before the illness, so it knows nothing of the
remedy. A process that is killed before it saves again would take the same remedy as if it were the
first one. The file counts for a run that resumes from exactly this step: a later checkpoint holds
more than it does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homeostat.errors import CheckpointError
from homeostat.json_text import parse_json
from homeostat.observe.durable import not_written, sync_folder, write_atomically

log = logging.getLogger(__name__)


def keep_healing(file: Path, healing: Mapping[str, Any], *, step: int) -> None:
    """Write the state of healing of a run that goes back to a step."""
    text = json.dumps({"step": step, "healing": healing}, indent=2) + "\n"
    try:
        write_atomically(file, text)
        sync_folder(file.parent)
    except OSError as error:
        # The run itself knows it: it is forgotten only if it is killed before its next checkpoint.
        log.error("%s", not_written(file, error))


def kept_healing(file: Path, *, step: int) -> Mapping[str, Any] | None:
    """Return the state of healing of a run that went back to this step; None if it did not."""
    try:
        kept = parse_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from None
    if not isinstance(kept, dict) or not isinstance(kept.get("healing"), dict):
        raise _unreadable(file, "it holds no state of healing")
    return kept["healing"] if kept.get("step") == step else None


def _unreadable(file: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read: {why}. It says which remedies were tried when the run last went "
        "back. Restore it, or remove it: the run then tries them again."
    )
