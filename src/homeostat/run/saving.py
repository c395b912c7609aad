"""What a run saves: checkpoints for itself, HF-format weights for everyone else."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from homeostat.config.run import RunConfig
from homeostat.errors import CheckpointWriteError
from homeostat.models.hf import save_hf
from homeostat.models.lora import save_adapter
from homeostat.run.session import Session
from homeostat.run.setup import Parts
from homeostat.types import Role

log = logging.getLogger(__name__)


class Saver:
    """Writes, prunes and reports checkpoints. A failed save never ends a run that can go on."""

    def __init__(self, config: RunConfig, parts: Parts, session: Session) -> None:
        self.config = config
        self.parts = parts
        self.session = session
        self.store = session.checkpoints
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Seconds spent saving since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def save(self, data_state: dict[str, Any], *, is_best: bool, at_end: bool, must: bool) -> None:
        """`must`: nothing comes after this save, so that a failure ends the run with an error."""
        recorder, step = self.session.recorder, self.parts.state.step
        recorder.flush()
        started = time.perf_counter()
        export = self.config.checkpoint.export
        with_export = export == "every" or (export == "final" and at_end)
        record = {"run": self.parts.state.as_json(), "data": data_state}
        extra = self._export if with_export else None
        try:
            tensors = self.parts.trainer.state()
            path = self.store.save(step, tensors, record, write_extra=extra)
            if is_best and self.config.eval.keep_best:
                self.store.mark_best(step)
        except CheckpointWriteError as error:
            recorder.event("checkpoint_failed", step, error=str(error))
            if must:
                raise
            log.error("%s Training goes on.", error)
            return
        seconds = time.perf_counter() - started
        self._seconds += seconds
        recorder.event("checkpoint_saved", step, path=str(path), seconds=seconds, best=is_best)
        if with_export:
            recorder.event("export_written", step, path=str(path / "hf"))
        self._prune(step)

    def _prune(self, step: int) -> None:
        limits = self.config.checkpoint
        removed = self.store.prune(keep_last=limits.keep_last, max_bytes=limits.max_bytes)
        if removed:
            self.session.recorder.event("checkpoint_pruned", step, removed=removed)

    def _export(self, building: Path) -> None:
        folder, lora, trainer = building / "hf", self.config.lora, self.parts.trainer
        if lora is not None and lora.export == "adapter":
            save_adapter(trainer.model, folder, lora, base_path=self.config.model.path)
        else:
            save_hf(
                trainer.weights(Role.POLICY),
                folder,
                source_config=trainer.loaded.source_config,
                generation_config=trainer.loaded.generation_config,
                max_shard_bytes=self.config.checkpoint.max_shard_bytes,
            )
        self.parts.tokenizer.save(folder)
