"""The Trainer protocol: what a training backend must do. tests/contract holds every one to it.

Models are addressed by role. An update is any number of `accumulate` calls and one `apply`; the
gradient is the same however the update's rows are split over the calls, because the loss carries
its denominator with it. Until `apply`, weights and optimizer state are untouched, so `discard`
undoes an update that was begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from homeostat.types import LossSpec, Role, TrainBatch, UpdateReport

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of the M trained tokens of a batch: log-prob and entropy of the distribution it is under.

    `index_M` is the token's place in the batch, `row_of_M` its row.
    """

    logp_M: Tensor
    entropy_M: Tensor | None
    index_M: Tensor
    row_of_M: Tensor


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of the training device (of the process, on the CPU) at their highest."""

    max_alloc: int
    max_reserved: int


class Trainer(Protocol):
    def score(self, role: Role, batch: TrainBatch, *, temperature: float = 1.0) -> TokenScores:
        """Log-probs of the trained tokens under the current weights, without gradients."""
        ...

    def accumulate(self, role: Role, batch: TrainBatch, spec: LossSpec, *, step: int) -> None:
        """Add this micro-batch's share of the gradient of update `step`, which keys dropout."""
        ...

    def discard(self, role: Role) -> None:
        """Forget what was accumulated since the last `apply`."""
        ...

    def apply(self, role: Role, *, step: int, learning_rate: float) -> UpdateReport:
        """Clip, check and apply the accumulated gradient; nothing that is not finite is applied."""
        ...

    def refresh_reference(self) -> None:
        """Make the policy of now the reference."""
        ...

    def weights(self, role: Role) -> Iterator[tuple[str, Tensor]]:
        """All weights of a role under canonical HF names, adapters merged in."""
        ...

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything an exact resume needs: file stem -> tensor name -> tensor."""
        ...

    def load_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Put back what `state` gave."""
        ...

    def memory_report(self) -> MemoryReport: ...
