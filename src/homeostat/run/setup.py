"""From a recipe to the parts of a run: rows, model, trainer, and the state to go on from."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from homeostat.config.run import RunConfig
from homeostat.data.loader import PlanLoader
from homeostat.data.store import RowStore, prepare_rows, split_rows
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.models.build import LoadedModel, load_model
from homeostat.observe.devices import GpuSampler
from homeostat.run.prepare_view import preparing
from homeostat.run.session import Session
from homeostat.train.local import LocalTrainer
from homeostat.train.memory import record_allocations
from homeostat.train.profile import StepProfiler
from homeostat.train.run_state import RunState
from homeostat.train.runtime import Runtime, resolve_runtime

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokenised rows, and which of them are trained on or held out."""

    train: RowStore
    train_ids: np.ndarray
    validation: RowStore
    validation_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class Parts:
    config: RunConfig
    tokenizer: ChatTokenizer
    rows: Rows
    trainer: LocalTrainer
    profiler: StepProfiler
    gpus: GpuSampler
    state: RunState
    total_steps: int
    data_state: dict | None

    def open_plans(self) -> PlanLoader:
        return PlanLoader(
            self.rows.train,
            self.rows.train_ids,
            trainer=self.config.trainer,
            algorithm=self.config.algorithm,
            shuffle=self.config.data.shuffle,
            prefetch_updates=self.config.data.prefetch_updates,
            seed=self.config.seed,
            total_steps=self.total_steps,
            state=self.data_state,
        )


def set_up(config: RunConfig, session: Session) -> Parts:
    found = session.resume.found
    state = RunState.from_json(found.state["run"]) if found is not None else RunState()
    runtime = resolve_runtime(config, threads=state.threads)
    state.threads = runtime.threads
    log.info("training on %s", runtime.describe())
    tokenizer = load_tokenizer(config.model)
    rows = open_rows(config, tokenizer, session)
    total_steps = config.trainer.total_steps(len(rows.train_ids))
    trainer = build_trainer(config, runtime, session)
    if found is not None:
        trainer.load_state(found.tensors())
    session.begin(total_steps=total_steps, model_line=describe_model(config, trainer.loaded))
    return Parts(
        config=config,
        tokenizer=tokenizer,
        rows=rows,
        trainer=trainer,
        profiler=StepProfiler(config.observe.profiler, session.run_dir, device=runtime.device),
        gpus=GpuSampler(),
        state=state,
        total_steps=total_steps,
        data_state=found.state["data"] if found is not None else None,
    )
