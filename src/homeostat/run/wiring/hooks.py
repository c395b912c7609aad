"""Hooks that are called at fixed points of a run. Normal runs have none.

The clinic uses them to inject faults such as happen in practice: it changes a weight, a file or a
process. A hook therefore gets the parts of the run, but cannot change what is recorded.

    started           once before the first step, when all parts are set up and the recorder is open
    before_step       before a step samples (RL) or takes its rows (SFT)
    before_update     the step's samples exist (RL); its updates are not computed yet
    after_update      the updates are applied; they have not been sent to the engine yet (RL)
    after_step        the step is recorded and judged; its checkpoint is not saved yet

A run that is rolled back to a checkpoint (health.heal=all) is set up again: `started` is called
again with new parts, and the steps after the checkpoint are repeated.
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
    """Does nothing. Override the methods that you need; an error that one raises ends the run."""

    def started(self, parts: AnyParts, session: Session) -> None:
        """The attributes of `parts`, such as `parts.trainer`, may be wrapped here."""

    def before_step(self, step: int, parts: AnyParts) -> None: ...

    def before_update(
        self, step: int, parts: AnyParts, rollouts: StepRollouts | None = None
    ) -> None:
        """`rollouts` are the samples of the step in RL, None in SFT."""

    def after_update(self, step: int, parts: AnyParts) -> None: ...

    def after_step(self, step: int, parts: AnyParts) -> None: ...


NO_HOOKS = Hooks()
