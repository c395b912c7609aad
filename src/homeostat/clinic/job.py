"""The description of a run that is passed to a process of the clinic."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from homeostat.clinic.recipes import Base


class Kind(StrEnum):
    """The kind of a job."""

    BASE = "base"
    HEALTHY = "healthy"
    ILL = "ill"


@dataclass(frozen=True, slots=True)
class Job:
    """A base policy, a healthy run or a fault, by its name. `heal` is that of the recipe."""

    kind: Kind
    name: str
    seed: int
    folder: str
    bases: str
    heal: str = "off"
    deadline_s: float = 150.0
    base: Base | None = None

    @property
    def run_dir(self) -> Path:
        return Path(self.folder) / "runs" / "run"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        raw = json.loads(text)
        if raw["base"] is not None:
            raw["base"] = Base(**raw["base"] | {"num_digits": tuple(raw["base"]["num_digits"])})
        return cls(**raw | {"kind": Kind(raw["kind"])})
