"""How far a run has come: what a checkpoint remembers beside tensors and the data's place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class RunState:
    step: int = 0
    num_tokens: int = 0
    num_skipped: int = 0
    best_loss: float | None = None
    evals_without_better: int = 0
    stopped_early: bool = False
    # None until memory ran out once; then the tokens a micro-batch may have.
    token_budget: int | None = None
    # Kept over a resume: sums depend on it in their last bits.
    threads: int | None = None

    def judge(self, loss: float, *, min_delta: float) -> bool:
        """Take in an evaluation; True when it is the best so far."""
        better = self.best_loss is None or loss < self.best_loss - min_delta
        if better:
            self.best_loss = loss
        self.evals_without_better = 0 if better else self.evals_without_better + 1
        return better

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RunState:
        return cls(**fields)
