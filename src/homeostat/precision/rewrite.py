"""The calls that tell a rewritten model about steps, changed weights, and the end of updates.

A rewrite to another precision leaves the parameters as they are. It derives its own copies of the
weights from them, and it may begin at a later step than the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Rewrite(Protocol):
    """A model's layers in another precision."""

    def begin_step(self, step: int) -> None:
        """Compute as step `step`, counted from 1, does: whether it does so depends on that alone.

        A rewrite that was never told computes as the first step does.
        """
        ...

    def weights_changed(self) -> None:
        """Derive copies of the weights anew before they are used again."""
        ...

    def end_update(self, *, applied: bool) -> None:
        """Keep, or forget, what was recorded while the gradients of an update were computed."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors that an exact resume needs, by name."""
        ...

    def restored(self) -> None:
        """Go on from the tensors of `state`, which have been filled."""
        ...

    def describe(self) -> str:
        """Return a line for the start of a run."""
        ...
