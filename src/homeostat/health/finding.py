"""What a rule says: findings with evidence, causes in order, and fixes with a grade."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Family(StrEnum):
    """Which part of a run is ill."""

    CONFIG = "config"
    DATA = "data"
    NUMERICS = "numerics"
    LEARNING = "learning"
    REWARD = "reward"
    POLICY = "policy"
    OFFPOLICY = "offpolicy"
    GENERATION = "generation"
    SYNC = "sync"
    MOE = "moe"
    PRECISION = "precision"
    SPECULATIVE = "speculative"
    MEMORY = "memory"
    DISTRIBUTED = "distributed"
    CHECKPOINT = "checkpoint"
    INSTALL = "install"
    PERFORMANCE = "performance"
    AGENTS = "agents"


class Level(StrEnum):
    """How bad it is. info: worth knowing, nothing to do. warn: look. error: the run is ill."""

    INFO = "info"
    WARN = "warn"
    ERROR = "error"

    @property
    def rank(self) -> int:
        return list(Level).index(self)


class Confidence(StrEnum):
    """measured: an invariant or an error's own words. inferred: several signs agree. heuristic:
    a threshold that experience gave."""

    MEASURED = "measured"
    INFERRED = "inferred"
    HEURISTIC = "heuristic"

    @property
    def rank(self) -> int:
        return -list(Confidence).index(self)


class Grade(StrEnum):
    """safe: changes neither objective, data order nor sampled distribution. unsafe: changes how
    the run learns. advice: for a person to weigh."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    ADVICE = "advice"


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause, by its name in the vocabulary, and what speaks for it here."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Fix:
    """What to change. `setting` is our key; a framework's table knows its name there.

    `theirs` names the setting where a framework has one that our keys do not map to: framework
    -> setting (or command). An empty setting is advice that no setting gives.
    """

    setting: str
    value: str
    why: str
    grade: Grade = Grade.ADVICE
    theirs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a rule's check yields; the engine adds whose it is. Values are as measured.

    `subject` tells several findings of one rule apart (a reward's name, a layer). `level`,
    `confidence` and `family` override the rule's own. `last_step` is where it was seen last.
    """

    message: str
    evidence: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    fixes: tuple[Fix, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    value: float | None = None
    limit: float | None = None
    subject: str = ""
    level: Level | None = None
    confidence: Confidence | None = None
    family: Family | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """A check that found, on looking closer, that it cannot judge: why."""

    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One illness of one run."""

    code: str
    name: str
    family: Family
    level: Level
    confidence: Confidence
    message: str
    evidence: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    fixes: tuple[Fix, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    value: float | None = None
    limit: float | None = None
    subject: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """There is at most one open finding of a key."""
        return self.code, self.subject


@dataclass(frozen=True, slots=True)
class NotEvaluated:
    """A rule that could not be judged, and why: a missing metric is never healthy."""

    code: str
    name: str
    why: str
