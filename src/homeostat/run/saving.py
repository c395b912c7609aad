"""What a run saves: checkpoints for itself, HF-format weights for everyone else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from homeostat.config.run import RunConfig
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import CheckpointError
from homeostat.models.hf import save_hf
from homeostat.models.lora import save_adapter
from homeostat.observe.recorder import Recorder
from homeostat.train.checkpoint import CheckpointStore
from homeostat.train.local import LocalTrainer
from homeostat.train.run_state import RunState
from homeostat.types import Role


class Saver:
    """Writes, prunes and reports checkpoints. A failed save never ends a run that can go on."""

    def __init__(
        self,
        config: RunConfig,
        store: CheckpointStore,
        *,
        trainer: LocalTrainer,
        tokenizer: ChatTokenizer,
        recorder: Recorder,
    ) -> None:
        self.config = config
        self.store = store
        self.trainer = trainer
        self.tokenizer = tokenizer
        self.recorder = recorder

    def save(self, state: RunState, data_state: dict[str, Any], *, final: bool) -> bool:
        """True when it is on disk. The last save of a run must succeed; others may be missed."""
        self.recorder.flush()
        start = time.perf_counter()
        export = self.config.checkpoint.export
        with_export = export == "every" or (export == "final" and final)
        record = {"run": state.as_json(), "data": data_state}
        try:
            path = self.store.save(
                state.step,
                self.trainer.state(),
                record,
                write_extra=self._export if with_export else None,
            )
        except CheckpointError as error:
            self.recorder.event("checkpoint_failed", state.step, error=str(error))
            if final:
                raise
            return False
        seconds = time.perf_counter() - start
        self.recorder.log(state.step, {"time/checkpoint": seconds})
        self.recorder.event("checkpoint_saved", state.step, path=str(path), seconds=seconds)
        if with_export:
            self.recorder.event("export_written", state.step, path=str(path / "hf"))
        self._prune(state.step)
        return True

    def _prune(self, step: int) -> None:
        limits = self.config.checkpoint
        removed = self.store.prune(keep_last=limits.keep_last, max_bytes=limits.max_bytes)
        if removed:
            self.recorder.event("checkpoint_pruned", step, removed=removed)

    def _export(self, building: Path) -> None:
        folder = building / "hf"
        folder.mkdir()
        lora = self.config.lora
        if lora is not None and lora.export == "adapter":
            save_adapter(self.trainer.model, folder, lora, base=self.config.model.path)
        else:
            save_hf(
                self.trainer.weights(Role.POLICY),
                folder,
                source_config=self.trainer.loaded.source_config,
                max_shard_bytes=self.config.checkpoint.max_shard_bytes,
            )
        self.tokenizer.save(folder)
