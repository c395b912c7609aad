"""Reads journals of earlier versions, which had one file per step and round of sampling.

    journal/step_00000012_round_00.safetensors

A file holds the arrays of all groups of its round, and a JSON header with the legend, a checksum
and `facts` of the round. It was written under another name, synced and renamed. So a file is either
whole, or its checksum is wrong and it is ignored. Files of this form are no longer written.

Format 1 did not distinguish a failed reward from None. It counted failures per round. If a reward
failed in a round, all None values of that reward in the round are read as failures: it is better to
skip a sample than to train on a wrong reward.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from homeostat.rollout.group_arrays import FAILED, NONE, Arrays, PromptOf, decode
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.keys import GroupKey

_FORMATS = (1, 2)
_NAME = re.compile(r"step_(\d{8})_round_(\d{2,})\.safetensors")
# Exceptions that reading damaged bytes is known to raise.
_DAMAGE = (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError)

log = logging.getLogger(__name__)


class RoundFiles:
    """The rounds that an earlier version left in a journal's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = (_NAME.fullmatch(path.name) for path in folder.glob("step_*.safetensors"))
        self._rounds = sorted((int(name[1]), int(name[2])) for name in found if name)
        # The round that was read last, because its groups are read one after another.
        self._last: tuple[Path, PromptOf, list[GroupRecord]] | None = None

    def steps(self) -> set[int]:
        return {step for step, _ in self._rounds}

    def keys(self, step: int) -> list[GroupKey]:
        """Return the keys of a step's groups, in the order of drawing."""
        found = []
        for round in [round for at, round in self._rounds if at == step]:
            loaded = _loaded(self._path(step, round))
            count = 0 if loaded is None else len(loaded[1]["group/prompt_ids"])
            found += [GroupKey(step, round, place) for place in range(count)]
        return found

    def read(self, key: GroupKey, prompt_of: PromptOf) -> GroupRecord | None:
        """Return a group with the facts of its round. Raises DataError if `prompt_of` gives another
        prompt than one of the round's was sampled for."""
        if (key.step, key.round) not in self._rounds:
            return None
        path = self._path(key.step, key.round)
        if self._last is None or self._last[:2] != (path, prompt_of):
            self._last = (path, prompt_of, _records(path, key, prompt_of))
        records = self._last[2]
        return records[key.place] if key.place < len(records) else None

    def drop_after(self, step: int) -> None:
        self._remove(entry for entry in self._rounds if entry[0] > step)

    def prune_before(self, step: int) -> None:
        self._remove(entry for entry in self._rounds if entry[0] < step)

    def _path(self, step: int, round: int) -> Path:
        return self.folder / f"step_{step:08d}_round_{round:02d}.safetensors"

    def _remove(self, entries: Iterable[tuple[int, int]]) -> None:
        for step, round in list(entries):
            path = self._path(step, round)
            try:
                path.unlink(missing_ok=True)
                self._rounds.remove((step, round))
            except OSError as error:
                # The leftover only costs disk space: `facts` keep it from being used in error.
                log.warning("%s cannot be removed: %s", path, error.strerror)


def _records(path: Path, key: GroupKey, prompt_of: PromptOf) -> list[GroupRecord]:
    """Return the groups of the round that a key is in; none if the file is damaged."""
    loaded = _loaded(path)
    if loaded is None:
        return []
    header, arrays = loaded
    groups = decode(header, arrays, prompt_of, place=path)
    # Values that rewards logged belong to the whole round, so the first group carries them.
    logged = [_as_values(header["facts"].get("logged", {})), *[{}] * len(groups)]
    return [
        GroupRecord(replace(key, place=place), group, {**header["facts"], "logged": logged[place]})
        for place, group in enumerate(groups)
    ]


def _loaded(path: Path) -> tuple[dict[str, Any], Arrays] | None:
    """Return header and arrays of a file, or None if it is damaged."""
    try:
        return _load(path)
    except _DAMAGE as error:
        log.warning("%s is damaged and counts as not there: %s", path, error)
        return None


def _load(path: Path) -> tuple[dict[str, Any], Arrays]:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        names = file.keys()
        arrays = {name: file.get_tensor(name) for name in names}
    digest, _, text = metadata["journal"].partition(" ")
    if _digest(text, arrays) != digest:
        raise ValueError("its checksum is wrong")
    header = json.loads(text)
    if header["version"] not in _FORMATS:
        raise ValueError(f"its format is {header['version']}, and {_FORMATS} can be read")
    if header["version"] == 1:
        _mark_failures(header, arrays)
    return header, arrays


def _digest(header: str, arrays: Arrays) -> str:
    digest = hashlib.sha256(header.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _mark_failures(header: dict[str, Any], arrays: Arrays) -> None:
    """Mark every None of a reward that failed in the round as failed (format 1)."""
    counts = header["facts"].get("missing", {})
    kinds = arrays["sample/rewards/kinds"]
    for column, name in enumerate(header["rewards"]):
        if counts.get(f"rewards/{name}/failed", 0):
            kinds[kinds[:, column] == NONE, column] = FAILED


def _as_values(logged: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return values that have the sum and the number that a round kept of what was logged."""
    return {name: [total, *[0.0] * (int(num) - 1)] for name, (total, num) in logged.items()}
