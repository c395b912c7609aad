"""The kinds of reward failures, in words that metrics, events and docs share.

Stdlib only: the worker processes import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ProblemKind(StrEnum):
    """Why samples have no value from a reward."""

    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    WORKER_DIED = "worker_died"
    WRONG_LENGTH = "wrong_length"
    WRONG_TYPE = "wrong_type"
    NOT_FINITE = "not_finite"
    NONE = "none"

    @property
    def is_error(self) -> bool:
        """Return whether it is a failure; None only means that the reward does not apply."""
        return self is not ProblemKind.NONE


@dataclass(frozen=True, slots=True)
class RewardProblem:
    """One call of a reward that left `num_samples` of a group's samples without a value.

    `completion` is the first sample at fault, or None if the call failed as a whole. `streak` is
    the number of consecutive calls in which the reward has timed out.
    """

    reward: str
    kind: ProblemKind
    message: str
    prompt_id: int
    prompt: str
    num_samples: int
    completion: str | None = None
    traceback_tail: str = ""
    streak: int = 0

    def __str__(self) -> str:
        text = f"reward {self.reward}, row {self.prompt_id}: {self.message}"
        return f"{text} ({self.streak} calls in a row)" if self.streak > 1 else text


def shorten(text: str, limit: int = 300) -> str:
    """Return the beginning and the end of a text, which tell more than the beginning alone."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def tidy(text: str, limit: int) -> str:
    """Return the end of a text of several lines, where errors say what they are."""
    return "\n".join(shorten(line) for line in text.splitlines())[-limit:]
