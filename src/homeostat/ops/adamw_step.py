"""The numbers of one AdamW update, which plain torch and the GPU's kernel share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """Numbers of an update, from which all factors are derived in double precision."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    step: int

    @property
    def kept(self) -> float:
        """Return the share of a weight that decay leaves."""
        return 1.0 - self.lr * self.decay

    @property
    def size(self) -> float:
        """Return the learning rate, corrected for the first moment's start at 0."""
        return self.lr / (1.0 - self.beta1**self.step)

    @property
    def root(self) -> float:
        """Return the square root of the second moment's correction."""
        return (1.0 - self.beta2**self.step) ** 0.5
