"""The actions that remedies can take on a running run, for run/healing/healer.py."""

from __future__ import annotations

from typing import Any

from homeostat.errors import CheckpointError
from homeostat.health.remedies import Action
from homeostat.run.healing.healer import Done
from homeostat.run.publication.publish import SentWeights
from homeostat.run.session.session import Session
from homeostat.run.sizing.token_budget import sized
from homeostat.run.wiring.rl_setup import RlParts
from homeostat.run.wiring.sft_setup import Parts


class SftActions:
    """The actions of any run."""

    def __init__(self, parts: Parts | RlParts, session: Session) -> None:
        self.parts = parts
        self.session = session

    def act(self, action: str) -> Done | None:
        return self._lower_budget() if action == Action.LOWER_TOKEN_BUDGET else None

    def undo(self, action: str, old: Any) -> bool:
        if action == Action.LOWER_TOKEN_BUDGET:
            self.parts.state.token_budget = old
        return action == Action.LOWER_TOKEN_BUDGET

    def healthy_step(self, *, before: int) -> int | None:
        store = self.session.checkpoints
        for step in [step for step in reversed(store.steps()) if step < before]:
            try:
                state = store.at_step(step).state
            except CheckpointError:
                continue
            was_ill = bool(state.get("health", {}).get("monitor", {}).get("errors"))
            if not was_ill and not state["run"]["skipped_in_a_row"]:
                return step
        # Before its first checkpoint was due, a run loses little by starting again.
        is_early = 0 < before <= self.parts.config.checkpoint.interval_steps + 1
        return 0 if is_early else None

    def _lower_budget(self) -> Done | None:
        """Halve the tokens per micro-batch, which keeps the gradient; never below one row."""
        config, state = self.parts.config, self.parts.state
        sizes = config.trainer
        if state.token_budget is None and not sizes.packing:
            return None
        old = state.token_budget
        now = old or sized(sizes, state).tokens_per_micro_batch
        new = max(config.longest_example, now // 2)
        if new >= now:
            return None
        state.token_budget = new
        return Done("trainer.max_tokens_per_device", old, new)


class RlActions(SftActions):
    """The actions of an RL run."""

    def __init__(self, parts: RlParts, session: Session) -> None:
        super().__init__(parts, session)
        self.rl = parts

    def act(self, action: str) -> Done | None:
        feed = self.rl.feed
        if action == Action.REPUBLISH and isinstance(feed, SentWeights):
            feed.republish()
            return Done()
        return super().act(action)
