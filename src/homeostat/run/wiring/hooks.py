"""Moments of a run at which somebody else may lay hands on it. Normal runs have none.

The clinic makes a run ill by them, as the world would: it changes a weight, a file, a process. So a
hook gets the run's own parts, and nothing that is written down goes through it.

    started           once, when all parts stand and records are open, before the first step
    before_step       before a step samples, or takes its rows
    before_update     the step's samples are there (RL), its updates are not computed yet
    after_update      the updates are applied; the engine has not been sent them yet (RL)
    after_step        the step is recorded and judged; its checkpoint is not saved yet

A run that goes back to a checkpoint (health.heal=all) is set up anew: `started` comes again with
new parts, and the steps after the checkpoint come a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from homeostat.rollout.collect import StepRollouts
    from homeostat.run.session.session import Session
    from homeostat.run.wiring.rl_setup import RlParts
    from homeostat.run.wiring.sft_setup import Parts

    AnyParts = Parts | RlParts


class Hooks:
    """Does nothing; override what is of use. An error that a hook raises ends the run."""

    def started(self, parts: AnyParts, session: Session) -> None:
        """Parts may be wrapped here: `parts.trainer`, `parts.engine`, `parts.feed` ..."""

    def before_step(self, step: int, parts: AnyParts) -> None: ...

    def before_update(
        self, step: int, parts: AnyParts, rollouts: StepRollouts | None = None
    ) -> None:
        """`rollouts` are those of the step (RL), None in SFT."""

    def after_update(self, step: int, parts: AnyParts) -> None: ...

    def after_step(self, step: int, parts: AnyParts) -> None: ...


NO_HOOKS = Hooks()
