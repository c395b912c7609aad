"""The actions that remedies can take on a running run, for run/healing/healer.py."""

from __future__ import annotations

from typing import Any

from homeostat.config.run import RunConfig
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
        if action == Action.BACK_TO_BF16:
            return self._back_to_bf16()
        return self._lower_budget() if action == Action.LOWER_TOKEN_BUDGET else None

    def undo(self, action: str, old: Any) -> bool:
        if action == Action.LOWER_TOKEN_BUDGET:
            self.parts.state.token_budget = old
        elif action == Action.BACK_TO_BF16:
            self.parts.live.revert(*_low_precision(self.parts.live.recipe))
        return action in (Action.LOWER_TOKEN_BUDGET, Action.BACK_TO_BF16)

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

    def _back_to_bf16(self) -> Done | None:
        """Compute without quantisation from here on. An engine would not follow: not in RL."""
        live, sections = self.parts.live, _low_precision(self.parts.live.now)
        if not sections or live.recipe.is_rl:
            return None
        for section in sections:
            live.edit(section, None, step=self.parts.state.step + 1)
        return Done()

    def _lower_budget(self) -> Done | None:
        """Halve the tokens per micro-batch, which keeps the gradient; never below one row."""
        config, state = self.parts.config, self.parts.state
        sizes = config.trainer
        if state.token_budget is None and not sizes.packing:
            return None
        # The budget is that of a micro-batch, the setting that of each rank that shares it.
        old, ranks = state.token_budget, sizes.backend.ranks_per_micro_batch
        now = old or sized(sizes, state).tokens_per_micro_batch
        new = -(-max(config.longest_example, now // 2) // ranks)
        if new * ranks >= now:
            return None
        state.token_budget = new * ranks
        return Done("trainer.max_tokens_per_device", None if old is None else old // ranks, new)


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


def _low_precision(config: RunConfig) -> list[str]:
    """Return the sections of quantised layers that a config has."""
    found = {"trainer.fp8": config.trainer.fp8, "trainer.int4": config.trainer.int4}
    return [path for path, section in found.items() if section is not None]
