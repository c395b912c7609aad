"""What can be done to a run while it goes on, for run/healing/healer.py. Anything else is advice.

An edit reaches whoever computes with the key: the learner and its loss, the sampler, the feed that
sends weights. The journal's rounds of other settings are not taken for those of now: edits are part
of what names their origin.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from homeostat.config.run import RunConfig
from homeostat.errors import CheckpointError
from homeostat.health.remedies import Action
from homeostat.rollout.collect import Collector
from homeostat.run.healing.healer import Done, Edit
from homeostat.run.healing.watch import settings_of
from homeostat.run.learning.learn import Learner
from homeostat.run.publication.publish import SentWeights
from homeostat.run.publication.verify_logprobs import LogprobVerifier
from homeostat.run.session.session import Session
from homeostat.run.sizing.token_budget import sized
from homeostat.run.wiring.rl_setup import RlParts
from homeostat.run.wiring.sft_setup import Parts


class SftWays:
    """Of a run whose loop asks the healer for its config at every step."""

    def __init__(self, parts: Parts | RlParts, session: Session) -> None:
        self.parts = parts
        self.session = session

    def can_edit(self, path: str) -> bool:
        return path == "trainer.lr"

    def put_in_force(self, config: RunConfig, overlay: Mapping[str, Edit]) -> None:
        self.session.watch.monitor.reconfigure(settings_of(config))

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
        # Before its first checkpoint was due, a run loses little by beginning anew.
        is_early = 0 < before <= self.parts.config.checkpoint.interval_steps + 1
        return 0 if is_early else None

    def _lower_budget(self) -> Done | None:
        """Half the tokens per micro-batch, to the same gradient; never below one row."""
        config, state = self.parts.config, self.parts.state
        sizes = config.trainer
        if state.token_budget is None and not sizes.packing:
            return None
        old = state.token_budget
        now = old or sized(sizes, state).tokens_per_micro_batch
        new = max(config.longest_row, now // 2)
        if new >= now:
            return None
        state.token_budget = new
        return Done("trainer.max_tokens_per_device", old, new)


class RlWays(SftWays):
    """Of a run that samples."""

    def __init__(
        self, parts: RlParts, session: Session, *, learner: Learner, verifier: LogprobVerifier
    ) -> None:
        super().__init__(parts, session)
        self.rl = parts
        self.learner = learner
        self.verifier = verifier
        collector = parts.collector
        # What another run sampled has an origin of its own, and no setting of it can be edited.
        self._origin = collector.origin if isinstance(collector, Collector) else ""

    def can_edit(self, path: str) -> bool:
        config = self.rl.config
        algorithm = config.algorithm
        assert algorithm.type != "sft", "RL has an algorithm of RL"
        kl = algorithm.kl
        # What was sampled long ago has its own temperature, age and policy.
        samples = config.debug is None
        return {
            "trainer.lr": True,
            "trainer.updates_per_step": True,
            "algorithm.clip_high": True,
            # One with a target adapts by itself, and without a reference there is none.
            "algorithm.kl.coefficient": kl is not None and kl.target is None,
            "algorithm.correction.off_policy_mask": algorithm.correction is not None,
            "rollout.temperature": samples,
            "sync.interval": samples and isinstance(self.rl.feed, SentWeights),
        }.get(path, False)

    def put_in_force(self, config: RunConfig, overlay: Mapping[str, Edit]) -> None:
        super().put_in_force(config, overlay)
        collector, feed = self.rl.collector, self.rl.feed
        self.learner.config = self.verifier.config = config
        if isinstance(collector, Collector):
            collector.reconfigure(config.rollout, origin=_origin_of(self._origin, overlay))
        if isinstance(feed, SentWeights):
            feed.reconfigure(config)
        assert config.algorithm.type != "sft", "RL has an algorithm of RL"
        kl = config.algorithm.kl
        if kl is not None and kl.target is None:
            self.rl.rl_state.kl_coefficient = kl.coefficient

    def act(self, action: str) -> Done | None:
        feed = self.rl.feed
        if action == Action.REPUBLISH and isinstance(feed, SentWeights):
            feed.republish()
            return Done()
        return super().act(action)


def _origin_of(origin: str, overlay: Mapping[str, Edit]) -> str:
    if not overlay:
        return origin
    edits = {path: asdict(edit) for path, edit in sorted(overlay.items())}
    return hashlib.sha256(json.dumps([origin, edits]).encode()).hexdigest()
