"""Checkpoints that are either complete or absent.

A checkpoint is written into a hidden folder next to its final place. Every file is synced, a
manifest with sizes and SHA-256 sums is written last, and one rename puts the folder in place; then
`latest` is replaced. If a power cut or a full disk interrupts this, earlier checkpoints stay
intact. Only safetensors and JSON are written, so reading a checkpoint never runs code from its
files.

    checkpoints/latest                  name of the newest
    checkpoints/best                    name of the one with the lowest eval/loss
    checkpoints/step_00000200/          model and optimizer .safetensors, state.json, hf/,
                                        manifest.json
    checkpoints/set_aside_*/            checkpoints beyond a step that a run went back to
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from homeostat.errors import CheckpointError, CheckpointWriteError, DiskFullError
from homeostat.json_text import parse_json
from homeostat.observe.durable import (
    OUT_OF_SPACE,
    FileErrorsAsOsError,
    sha256_of,
    sync_file,
    sync_folder,
    write_atomically,
)

Write = Callable[[Path], None]

_NAME = re.compile(r"step_(\d{8})")
_MANIFEST = "manifest.json"
_REPLACED = ".replaced_"


@dataclass(frozen=True, slots=True)
class Found:
    """A valid checkpoint, and the newer ones that had to be skipped, with the reason."""

    path: Path
    step: int
    state: dict[str, Any]
    passed_over: tuple[tuple[str, str], ...]

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    def section(self, name: str) -> dict[str, Any]:
        """A part of the state, by its key."""
        value = self.state.get(name)
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.state_file}: {name} is {value!r:.60}, not an object.")
        return value


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        """Open the folder. With `read_only` nothing is changed, so it may belong to a live run."""
        self.folder = folder
        self.read_only = read_only

    def steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def save(
        self,
        step: int,
        write: Write,
        state: dict[str, Any],
        *,
        num_bytes: int,
        best: bool = False,
    ) -> Path:
        """Save `state` and the files that `write` puts into a folder, about `num_bytes` of them.

        If that fails, nothing is left behind, and CheckpointWriteError is raised (DiskFullError for
        lack of space).
        """
        final = self.path(step)
        building = self.folder / f".building_{final.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._put_back()
            self._remove_leftovers()
            self._require_space(num_bytes)
            building.mkdir()
            with FileErrorsAsOsError():
                write(building)
            (building / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
            _write_manifest(building)
            self._put_in_place(building, final)
            self._point("latest", step)
            if best:
                self._point("best", step)
        except (OSError, SafetensorError) as error:
            raise _not_saved(error, final) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return final

    def mark_best(self, step: int) -> None:
        """Point to the best checkpoint, if it still exists and is not marked already."""
        if step != self.best_step() and self.path(step).is_dir():
            self._point("best", step)

    def best_step(self) -> int | None:
        return self._pointed("best")

    def newest_valid(self) -> Found | None:
        """Return the newest complete checkpoint. Broken ones are skipped and reported."""
        self._put_back()
        passed_over: list[tuple[str, str]] = []
        for step in reversed(self.steps()):
            broken = why_broken(self.path(step))
            if broken is None:
                return self._found(step, passed_over)
            passed_over.append((self.path(step).name, broken))
        if passed_over:
            name, why = passed_over[0]
            raise CheckpointError(
                f"none of the {len(passed_over)} checkpoints in {self.folder} is whole; the "
                f"newest, {name}: {why}. Move the folder away to start the run from the beginning."
            )
        return None

    def at_step(self, step: int, *, asked_by: str = "checkpoint.load_step=") -> Found:
        """Return the checkpoint of a step. An error names who asked for it."""
        self._put_back()
        path = self.path(step)
        if not path.is_dir():
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{asked_by}{step}: there is no such checkpoint in "
                f"{self.folder.absolute()}. Steps there: {known}."
            )
        if (broken := why_broken(path)) is not None:
            raise CheckpointError(f"{asked_by}{step}: {path.name} is broken: {broken}.")
        return self._found(step, [])

    def prune(self, *, keep_last: int, max_bytes: int | None) -> list[int]:
        """Remove the oldest checkpoints beyond the limits. Always keep the newest and the best."""
        steps = self.steps()
        safe = {*steps[-1:], self.best_step()}
        removed: list[int] = []
        for step in steps[:-keep_last]:
            if step not in safe:
                self._remove(step)
                removed.append(step)
        for step in steps:
            if max_bytes is None or self.total_bytes() <= max_bytes:
                break
            if step not in safe and step not in removed:
                self._remove(step)
                removed.append(step)
        return removed

    def make_room(self, *, keep_last: int) -> list[int]:
        """Make room for one more checkpoint on a full disk: remove those that would exceed the
        limit then. The newest complete checkpoint and the best one always stay."""
        steps = self.steps()
        whole = (step for step in reversed(steps) if why_broken(self.path(step)) is None)
        safe = {next(whole, None), self.best_step()}
        too_many = steps[: max(0, len(steps) - (keep_last - 1))]
        removed = [step for step in too_many if step not in safe]
        for step in removed:
            self._remove(step)
        return removed

    def set_aside_after(self, step: int) -> list[int]:
        """Move away checkpoints after the step from which a run continues, because they will be
        created again.
        """
        later = [other for other in self.steps() if other > step]
        if not later:
            return []
        number = 1 + len(list(self.folder.glob("set_aside_*")))
        aside = self.folder / f"set_aside_{number}_after_step_{step}"
        aside.mkdir()
        for other in later:
            os.rename(self.path(other), aside / self.path(other).name)
        if (best := self.best_step()) is not None and best > step:
            (self.folder / "best").unlink()
        self._point("latest", step)
        return later

    def total_bytes(self) -> int:
        files = (file for step in self.steps() for file in self.path(step).rglob("*"))
        return sum(file.stat().st_size for file in files if file.is_file())

    def _found(self, step: int, passed_over: list[tuple[str, str]]) -> Found:
        path = self.path(step)
        try:
            state = parse_json((path / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / 'state.json'} cannot be read: {error}.") from None
        if not isinstance(state, dict):
            raise CheckpointError(f"{path / 'state.json'} does not hold a JSON object.")
        return Found(path, step, state, tuple(passed_over))

    def _require_space(self, need: int) -> None:
        free = shutil.disk_usage(self.folder).free
        # With room for headers, the manifest and the logs.
        need = math.ceil(need * 1.02) + 2**20
        if free < need:
            text = f"{need / 1e6:,.2f} MB are needed and {free / 1e6:,.2f} MB are free"
            raise OSError(errno.ENOSPC, text)

    def _remove_leftovers(self) -> None:
        for leftover in self.folder.glob(".*_step_*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _put_in_place(self, building: Path, final: Path) -> None:
        """Put a checkpoint in place. One of the same step is replaced only when the new one is
        complete.
        """
        old = self.folder / f"{_REPLACED}{final.name}"
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
        os.rename(building, final)
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _put_back(self) -> None:
        """Restore checkpoints whose replacement was interrupted before the new one was in place."""
        if self.read_only:
            return
        for old in self.folder.glob(f"{_REPLACED}step_*"):
            place = self.folder / old.name.removeprefix(_REPLACED)
            if not place.exists():
                os.rename(old, place)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint. It is renamed first, so that an interruption leaves no half
        checkpoint.
        """
        doomed = self.folder / f".removing_{self.path(step).name}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(self.path(step), doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _point(self, name: str, step: int) -> None:
        write_atomically(self.folder / name, self.path(step).name + "\n")
        sync_folder(self.folder)

    def _pointed(self, name: str) -> int | None:
        file = self.folder / name
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        match = _NAME.fullmatch(text.strip())
        return int(match.group(1)) if match else None


def why_broken(path: Path) -> str | None:
    """Return None if all files of a checkpoint are as they were written, else the problem."""
    if not (path / _MANIFEST).is_file():
        return f"{_MANIFEST} is missing"
    try:
        manifest = parse_json((path / _MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest.items():
            file = path / name
            if not (name.isprintable() and isinstance(entry["bytes"], int)):
                return f"{_MANIFEST} was damaged"
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes of {entry['bytes']}"
            if sha256_of(file) != entry["sha256"]:
                return f"the content of {name} has changed since it was written"
        return None if "state.json" in manifest else "state.json is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"{_MANIFEST} cannot be read"


def _write_manifest(folder: Path) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    manifest = {}
    for file in files:
        sync_file(file)
        name = file.relative_to(folder).as_posix()
        manifest[name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    target = folder / _MANIFEST
    target.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync_file(target)
    sync_folder(folder)


def _not_saved(error: Exception, final: Path) -> CheckpointWriteError:
    full = isinstance(error, OSError) and error.errno in OUT_OF_SPACE
    full = full or "No space left" in str(error) or "File too large" in str(error)
    if full:
        return DiskFullError(
            f"{final.name} was not saved: the disk of {final.parent} is full ({error}). Earlier "
            "checkpoints are untouched. Free some space, lower checkpoint.keep_last or "
            "checkpoint.max_bytes, or set runs_dir to another disk."
        )
    text = f"{final.name} was not saved: {error}. Earlier checkpoints are untouched."
    return CheckpointWriteError(text)
