"""Actions that a run takes at once by itself (its guards), recognised by their events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.health.finding import Grade
from homeostat.health.remedies import Action


@dataclass(frozen=True, slots=True)
class OwnGuard:
    """An action of a guard, and how its event shows it. `when` lists the values that a field may
    have.
    """

    action: Action
    cause: str
    path: str = ""
    old: str = ""
    new: str = ""
    when: tuple[str, frozenset[str]] | None = None

    def applies(self, fields: Mapping[str, Any]) -> bool:
        return self.when is None or fields.get(self.when[0]) in self.when[1]

    def described(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the event that reports the action as a remedy."""
        return {
            "code": "",
            "cause": f"{self.cause}: {fields.get('error') or fields.get('origin') or ''}".strip(
                ": "
            ),
            "remedy": str(self.action),
            "path": self.path,
            "old": fields.get(self.old),
            "new": fields.get(self.new),
            "grade": str(Grade.SAFE),
            "window": 0,
        }


OWN_GUARDS: Mapping[str, OwnGuard] = {
    "oom_retry": OwnGuard(
        Action.RETRY_SMALLER,
        "memory ran out",
        "trainer.max_tokens_per_device",
        "tokens_before",
        "tokens_now",
    ),
    "step_skipped": OwnGuard(Action.SKIP_STEP, "loss or gradient not finite"),
    "engine_restarted": OwnGuard(Action.RESTART_ENGINE, "the engine's process died"),
    "trainer_restarted": OwnGuard(
        Action.RESTART_TRAINER, "the trainer's ranks died, hung or lost each other"
    ),
    "reward_trouble": OwnGuard(
        Action.RESTART_REWARD_WORKER,
        "a reward worker died or hung",
        when=("failure", frozenset({"worker_died", "timeout"})),
    ),
}
