"""Let a fault interfere with the steps of the policy's optimizer, whichever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from homeostat.types import Role


def around_step(
    parts: Any,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
    rate: Callable[[float], float] = lambda rate: rate,
) -> None:
    """Call `before` and `after` at every step, and give the optimizer another learning rate."""
    optimizer = parts.trainer.roles[Role.POLICY].training.optimizer
    step = optimizer.step

    def interfered(*, learning_rate: float, **how: Any) -> None:
        before()
        step(learning_rate=rate(learning_rate), **how)
        after()

    optimizer.step = interfered
