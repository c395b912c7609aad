"""Findings of rules, with their evidence, their causes in order, and graded fixes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# The start of evidence that quotes a line of the log.
QUOTE = re.compile(r"line (\d{1,12}): ")


class Family(StrEnum):
    """The part of a run that is ill."""

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
    """The severity. info: worth knowing, nothing to do. warn: look. error: the run is ill."""

    INFO = "info"
    WARN = "warn"
    ERROR = "error"

    @property
    def rank(self) -> int:
        return list(Level).index(self)


class Confidence(StrEnum):
    """The certainty of a finding.

    measured: an invariant is violated, or an error message states it. inferred: several signs
    agree. heuristic: the value exceeds a threshold that was chosen from experience.
    """

    MEASURED = "measured"
    INFERRED = "inferred"
    HEURISTIC = "heuristic"

    @property
    def rank(self) -> int:
        return -list(Confidence).index(self)


# The share of findings by errors' texts that named the confirmed cause, where it is well below 1:
# 111 of 129 and 10 of 15 of the threads from which no rule was written (bench/threads.py).
_SHARE_RIGHT = {Confidence.INFERRED: 0.85, Confidence.HEURISTIC: 0.65}


class Grade(StrEnum):
    """The risk of a fix.

    safe: changes neither the objective, the data order nor the sampled distribution. unsafe:
    changes how the run learns. advice: a person has to decide.
    """

    SAFE = "safe"
    UNSAFE = "unsafe"
    ADVICE = "advice"


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause, by its name in the vocabulary, with the evidence for it in this run.

    `guess` is the share of similar guesses that were right; None if the cause is not a guess.
    """

    name: str
    why: str
    guess: float | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """A recommended change. `setting` is our key; a framework's table translates it.

    `theirs` maps framework -> setting (or command), for settings that none of our keys corresponds
    to. If `setting` is empty, the fix is advice that no setting can express.
    """

    setting: str
    value: str
    why: str
    grade: Grade = Grade.ADVICE
    theirs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sighting:
    """The result of a rule's check; the engine adds the rule. Values are as measured.

    `subject` distinguishes several findings of one rule (the name of a reward, a layer). `level`,
    `confidence` and `family` override the rule's own. `last_step` is the last step at which the
    condition held.
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
    """The result of a check that found that it cannot judge this run, with the reason."""

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
        """Return the key of the finding; at most one finding per key is open."""
        return self.code, self.subject

    @property
    def certainty(self) -> str:
        """Return the confidence in words, with how often it is right if an error's text says it."""
        share = _SHARE_RIGHT.get(self.confidence) if self.code.startswith("ERR") else None
        right = f" (right in about {share:.0%} of cases)" if share else ""
        return f"{self.confidence}{right}"


def quoted_lines(finding: Finding) -> list[int]:
    """Return the numbers of the log lines that a finding quotes as evidence."""
    return [int(found[1]) for text in finding.evidence if (found := QUOTE.match(text))]


@dataclass(frozen=True, slots=True)
class NotEvaluated:
    """A rule that could not be judged, and why. A missing metric is never reported as healthy."""

    code: str
    name: str
    why: str
