"""Make one call of a user's filter for one scored group and interpret its answer.

A filter is called like a reward, in the same kind of worker, with the group's rewards in addition:

    f(completions=, rewards=, reward_values=, truncated=, prompts=, <column>=, ...)
        -> True | False | (keep, reason)

`rewards` has the weighted sum of every sample (None where a reward failed), `reward_values` each
reward's own values by its name, `truncated` whether the sample was cut off. Stdlib only: the worker
processes import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.errors import RewardError
from homeostat.rewards.calls import Answer, Call
from homeostat.rewards.problems import shorten

REASON = "reason"
# A longer text is no reason but an explanation; metrics have room for a few words.
MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class FilterCall(Call):
    """A scored group as the worker receives it."""

    rewards: list[float | None]
    reward_values: Mapping[str, list[float | None]]
    truncated: list[bool]

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of the call."""
        own = {
            "rewards": list(self.rewards),
            "reward_values": {name: list(values) for name, values in self.reward_values.items()},
            "truncated": list(self.truncated),
        }
        # Not super(): a dataclass with slots is another class than the one being defined here.
        return Call.keywords(self) | own

    def take(self, result: Any, answer: Answer) -> None:
        """Write a filter's result into the answer: 1 to keep the group, 0 to drop it."""
        keep, reason = _verdict(result)
        num = len(answer.values)
        answer.values = [float(keep)] * num
        answer.extras = {REASON: [reason] * num}


def _verdict(result: Any) -> tuple[bool, str]:
    keep, reason = result if isinstance(result, tuple) and len(result) == 2 else (result, "")
    # numpy's own bool is neither a bool nor an int.
    if type(keep).__name__ in ("bool", "bool_") and isinstance(reason, str | None):
        return bool(keep), (reason or "")[:MAX_REASON_CHARS]
    raise RewardError(
        f"it returned {shorten(repr(result), 100)}: a filter returns True, False or (keep, reason)"
    )
