"""What goes wrong in rewards is counted and shown with its input, and never ends the run."""

from __future__ import annotations

import logging
from collections import Counter

from homeostat.rewards.trouble import RewardTrouble
from homeostat.run.session import Session

# Of each kind of trouble of each reward, so many are written down in full.
MAX_EVENTS = 20

log = logging.getLogger(__name__)


class TroubleLog:
    """Turns troubles into events, and counts them for the step's metrics."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.step = session.start_step
        self._told: Counter[tuple[str, str]] = Counter()
        self._in_step: Counter[tuple[str, bool]] = Counter()

    def take(self, trouble: RewardTrouble) -> None:
        self._in_step[trouble.reward, trouble.kind.is_error] += trouble.num_samples
        key = (trouble.reward, trouble.kind)
        self._told[key] += 1
        if self._told[key] <= MAX_EVENTS:
            if trouble.kind.is_error:
                log.warning("%s", trouble)
            self.session.event(
                "reward_trouble",
                self.step,
                reward=trouble.reward,
                failure=str(trouble.kind),
                message=trouble.message,
                num_samples=trouble.num_samples,
                prompt_id=trouble.prompt_id,
                prompt=trouble.prompt,
                completion=trouble.completion,
                traceback=trouble.traceback_tail,
                calls_in_a_row=trouble.streak,
            )

    def metrics(self, labels: list[str]) -> dict[str, float]:
        """Values that were missing in this step, by reward; counting begins anew."""
        names = {True: "failed", False: "none"}
        found = {
            f"rewards/{label}/{name}": float(self._in_step[label, is_error])
            for label in labels
            for is_error, name in names.items()
        }
        self._in_step.clear()
        return found
