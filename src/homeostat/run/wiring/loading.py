"""Load the checkpoint that a run resumes from into its trainer."""

from __future__ import annotations

from homeostat.config.loading.live import with_saved_edits
from homeostat.config.run import RunConfig
from homeostat.run.learning.precision import begin_precision
from homeostat.train.saving.checkpoint import Found
from homeostat.train.trainer import Trainer


def load_checkpoint(trainer: Trainer, config: RunConfig, found: Found | None) -> None:
    """Load the checkpoint to resume from, if any, and compute as the run did when it was saved.

    The loop tells the trainer of each step that it begins. What comes before it, or in its place,
    needs this: a first publication, an evaluation, the export of a complete run.
    """
    if found is None:
        return
    trainer.load(found.path)
    then = with_saved_edits(config, found.state, place=str(found.state_file))
    begin_precision(trainer, then.trainer, found.step)
