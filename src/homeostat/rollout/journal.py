"""Keeps scored groups on disk before they are trained on, so that no run samples them twice.

    append(record) ... -> barrier() -> read(key)

    journal/groups_000000.log    frames (journal_part.py), appended in the order of drawing

A frame holds one group, or says that groups of later steps no longer count (`drop_after`), or is a
barrier. Invariants: when `barrier` returns, everything appended before it survives a power cut;
this costs one fsync. A group is found only if a barrier follows it. After a kill, therefore, either
all groups between two barriers are found or none of them. If two groups have the same key, the
later one counts. Reading returns bitwise what was written.

Files are never changed. Every process starts a new file, and another one when old groups are
pruned. The oldest files are removed first; otherwise groups that a later frame replaced or dropped
could reappear.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load, save

from homeostat.errors import RunDirWriteError
from homeostat.observe.durable import sync_folder
from homeostat.rollout.group_arrays import PromptOf, decode, encode
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.journal_part import Frame, PartWriter, frames
from homeostat.rollout.journal_rounds import RoundFiles
from homeostat.rollout.keys import GroupKey

FORMAT_VERSION = 3
_NAME = re.compile(r"groups_(\d{6,})\.log")
# Exceptions that reading damaged bytes is known to raise.
_DAMAGE = (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError)

log = logging.getLogger(__name__)


class Journal:
    """The journal of one run: the groups that its folder held when it was opened, and new ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rounds = RoundFiles(folder)
        self._parts = _parts(folder)
        self._groups: dict[GroupKey, Frame] = {}
        # Appended since the last barrier.
        self._pending: list[Frame] = []
        self._writer: PartWriter | None = None
        for path in self._parts:
            self._take_in(path)

    def append(self, record: GroupRecord) -> None:
        """Add a group. The next barrier makes it durable. Raises RunDirWriteError."""
        legend, arrays = encode([record.group])
        head = {"key": str(record.key), "facts": dict(record.facts), "legend": legend}
        self._append("group", head, save(arrays), step=record.key.step)

    def barrier(self) -> None:
        """Make everything that was appended durable: it survives a power cut. Raises
        RunDirWriteError.
        """
        if self._pending:
            steps = [GroupKey.parse(frame.head["key"]).step for frame in self._pending]
            self._seal(step=max(steps))

    def read(self, key: GroupKey, prompt_of: PromptOf) -> GroupRecord | None:
        """Return the group with a key, or None if there is no undamaged one.

        Raises DataError if `prompt_of` returns another prompt than the group was sampled for.
        """
        frame = self._groups.get(key)
        if frame is None:
            return self._rounds.read(key, prompt_of)
        try:
            arrays = load(frame.body())
        except _DAMAGE as error:
            log.warning("%s: %s is damaged and counts as not there: %s", frame.path, key, error)
            return None
        (group,) = decode(frame.head["legend"], arrays, prompt_of, place=frame.path)
        return GroupRecord(key, group, frame.head["facts"])

    def keys(self, step: int) -> list[GroupKey]:
        """Return the keys of a step's groups, in the order of drawing."""
        found = {key for key in self._groups if key.step == step}
        return sorted(found | set(self._rounds.keys(step)))

    def steps(self) -> list[int]:
        return sorted({key.step for key in self._groups} | self._rounds.steps())

    def drop_after(self, step: int) -> None:
        """Invalidate the groups of later steps. Raises RunDirWriteError."""
        self._rounds.drop_after(step)
        if any(key.step > step for key in self._groups):
            self._append("drop_after", {"step": step}, step=step)
            self._seal(step=step)

    def prune_before(self, step: int) -> None:
        """Remove the files that hold nothing but groups of earlier steps."""
        self._rounds.prune_before(step)
        self.close()
        needed = {frame.path for key, frame in self._groups.items() if key.step >= step}
        while self._parts and self._parts[0] not in needed:
            try:
                self._parts[0].unlink(missing_ok=True)
            except OSError as error:
                # An error here only costs disk space. Later files are not removed either, because
                # they may replace groups of this one.
                log.warning("%s cannot be removed: %s", self._parts[0], error.strerror)
                break
            self._parts.pop(0)
        kept = set(self._parts)
        self._groups = {key: frame for key, frame in self._groups.items() if frame.path in kept}

    def close(self) -> None:
        """Close the current file. Groups without a barrier are lost. Idempotent."""
        self._pending.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _append(self, kind: str, head: Mapping[str, Any], body: bytes = b"", *, step: int) -> None:
        try:
            writer = self._writer = self._writer or self._begin_part()
            whole = {"format": FORMAT_VERSION, "kind": kind, **head}
            self._pending.append(writer.append(whole, body))
        except OSError as error:
            raise self._refusal(error, step) from error

    def _seal(self, *, step: int) -> None:
        count = len(self._pending)
        self._append("barrier", {"frames": count}, step=step)
        assert self._writer is not None, "what is sealed was appended"
        try:
            self._writer.sync()
        except OSError as error:
            raise self._refusal(error, step) from error
        self._settle(self._pending[:count])
        self._pending.clear()

    def _begin_part(self) -> PartWriter:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            sync_folder(self.folder.parent)
        number = 1 + max((_number(path) for path in self._parts), default=-1)
        writer = PartWriter(self.folder / f"groups_{number:06d}.log")
        self._parts.append(writer.path)
        return writer

    def _refusal(self, error: OSError, step: int) -> RunDirWriteError:
        return RunDirWriteError(
            f"{self.folder}: the rollouts of step {step} cannot be written: {error.strerror}. Free "
            "some space, or set runs_dir to another disk. Nothing saved is lost."
        )

    def _take_in(self, path: Path) -> None:
        """Index the frames of a file that have a whole barrier behind them."""
        pending: list[Frame] = []
        try:
            for frame in frames(path):
                if frame.head["format"] != FORMAT_VERSION:
                    raise ValueError(f"format {frame.head['format']}, and this is {FORMAT_VERSION}")
                if frame.head["kind"] != "barrier":
                    pending.append(frame)
                    continue
                if frame.head["frames"] == len(pending):
                    self._settle(pending)
                else:
                    log.warning("%s is damaged: some of its groups count as not there", path)
                pending = []
        except _DAMAGE as error:
            log.warning("%s is damaged, and the rest of it counts as not there: %s", path, error)

    def _settle(self, sealed: list[Frame]) -> None:
        for frame in sealed:
            if frame.head["kind"] == "group":
                self._groups[GroupKey.parse(frame.head["key"])] = frame
            else:
                last = frame.head["step"]
                self._groups = {k: found for k, found in self._groups.items() if k.step <= last}


def _parts(folder: Path) -> list[Path]:
    """Return the files of a journal, oldest first."""
    return sorted((p for p in folder.glob("groups_*.log") if _NAME.fullmatch(p.name)), key=_number)


def _number(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None, path
    return int(found.group(1))
