"""Summarise the outcome of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from homeostat.run.session.session import Session
from homeostat.train.saving.run_state import RunState


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of one `homeostat train`, for a person or a program."""

    run_dir: Path
    step: int
    total_steps: int
    best_eval: float | None
    checkpoint: Path | None
    export: Path | None
    report: Path | None

    def as_json(self) -> dict[str, str | int | float | None]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {n: str(value) if isinstance(value, Path) else value for n, value in fields.items()}

    def lines(self) -> list[tuple[str, str]]:
        """Return name and value of each line that the terminal shows at the end."""
        shown = {
            "steps": f"{self.step} of {self.total_steps}",
            "best eval": None if self.best_eval is None else f"{self.best_eval:.4f}",
            "checkpoint": self.checkpoint,
            "weights": self.export,
            "report": self.report,
        }
        return [(name, str(value)) for name, value in shown.items() if value is not None]


def result_of(state: RunState, session: Session, *, total_steps: int) -> RunResult:
    """Return the outcome, with the paths of the files that exist."""
    steps = session.checkpoints.steps()
    checkpoint = session.checkpoints.path(steps[-1]) if steps else None
    export = checkpoint / "hf" if checkpoint is not None else None
    return RunResult(
        run_dir=session.run_dir.path,
        step=state.step,
        total_steps=total_steps,
        best_eval=state.best_eval,
        checkpoint=checkpoint,
        export=export if export is not None and export.is_dir() else None,
        report=session.run_dir.report if session.config.observe.report else None,
    )
