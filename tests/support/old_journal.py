"""Journals as earlier versions wrote them: one file per step and round of sampling."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from homeostat.rollout.group_arrays import PromptOf, encode
from homeostat.rollout.journal import Journal
from homeostat.types import RolloutGroup


def write_round(
    folder: Path,
    step: int,
    round: int,
    groups: Sequence[RolloutGroup],
    facts: Mapping[str, Any],
    *,
    version: int = 2,
) -> Path:
    legend, arrays = encode(groups)
    if version == 1:
        # Failures were not marked.
        kinds = arrays["sample/rewards/kinds"]
        kinds[kinds == 3] = 1
    text = json.dumps({"version": version, "facts": dict(facts), **legend})
    digest = hashlib.sha256(text.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:08d}_round_{round:02d}.safetensors"
    path.write_bytes(save(arrays, metadata={"journal": f"{digest.hexdigest()} {text}"}))
    return path


def rewrite_as_rounds(folder: Path, prompt_of: PromptOf) -> list[Path]:
    """Put the groups of a journal into the older form, and remove the newer one."""
    journal, written = Journal(folder), []
    for step in journal.steps():
        for round, keys in groupby(journal.keys(step), key=lambda key: key.round):
            records = [record for key in keys if (record := journal.read(key, prompt_of))]
            logged: dict[str, list[float]] = {}
            for record in records:
                for name, values in record.facts["logged"].items():
                    logged.setdefault(name, []).extend(values)
            sums = {name: [float(sum(values)), len(values)] for name, values in logged.items()}
            ids = [record.group.prompt.prompt_id for record in records]
            facts = {**records[0].facts, "prompt_ids": ids, "logged": sums}
            groups = [record.group for record in records]
            written.append(write_round(folder, step, round, groups, facts))
    for part in folder.glob("*.log"):
        part.unlink()
    return written
