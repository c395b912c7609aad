"""What goes wrong in rewards is shown with its input, and never ends the run."""

from __future__ import annotations

import logging
from collections import Counter

from homeostat.rewards.trouble import RewardTrouble
from homeostat.run.session.session import Session

# Of each kind of trouble of each reward, so many are written down in full.
MAX_EVENTS = 20

log = logging.getLogger(__name__)


class TroubleLog:
    """Turns troubles into events."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.step = session.start_step
        self._told: Counter[tuple[str, str]] = Counter()

    def take(self, trouble: RewardTrouble) -> None:
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
