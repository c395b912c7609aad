"""From a recipe to the parts of a run: rows, model, trainer, and the state to go on from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from homeostat.config.combinations import find_length_conflicts
from homeostat.config.run import RunConfig
from homeostat.data.loader import PlanLoader
from homeostat.data.prepare import prepare_rows, split_rows
from homeostat.data.prompts import PromptSet
from homeostat.data.store import RowStore
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.errors import CheckpointError, ConfigError, ModelError
from homeostat.models.build import ModelSheet
from homeostat.observe import format as fmt
from homeostat.observe.devices import GpuSampler
from homeostat.run.session.session import Session
from homeostat.run.session.waiting import progress_of
from homeostat.run.sizing.token_budget import choose_tokens, sized, tokens_line
from homeostat.train.build import local_trainer
from homeostat.train.checkpoint import Found
from homeostat.train.profile import StepProfiler
from homeostat.train.run_state import RunState
from homeostat.train.runtime import Runtime, resolve_runtime
from homeostat.train.sharded import start_sharded
from homeostat.train.trainer import Trainer
from homeostat.types import IntArray

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowSet:
    """Tokenised rows, and the ones of them that are meant."""

    store: RowStore
    ids: IntArray

    @classmethod
    def whole(cls, store: RowStore) -> RowSet:
        return cls(store, np.arange(len(store), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Parts:
    """All that the loop works with."""

    config: RunConfig
    tokenizer: ChatTokenizer
    train_rows: RowSet
    eval_rows: RowSet | None
    trainer: Trainer
    profiler: StepProfiler
    gpus: GpuSampler
    state: RunState
    data_state: dict[str, Any] | None
    total_steps: int

    @property
    def is_complete(self) -> bool:
        return self.state.step >= self.total_steps or self.state.stopped_early

    def open_plans(self) -> PlanLoader:
        return PlanLoader(
            self.train_rows.store,
            row_ids=self.train_rows.ids,
            trainer=sized(self.config.trainer, self.state),
            data=self.config.data,
            algorithm=self.config.algorithm,
            seed=self.config.seed,
            num_data_groups=self.trainer.num_data_groups,
            state=self.data_state,
        )


@contextmanager
def set_up(config: RunConfig, session: Session) -> Iterator[Parts]:
    """The parts, and an end to what they started."""
    found = session.resume.found
    state = restored_state(found) if found is not None else RunState()
    runtime = resolve_runtime(config, kept=state.way)
    state.way = runtime.way
    state.chosen_tokens = choose_tokens(config, runtime, kept=state.chosen_tokens)
    log.info("training on %s%s", runtime.describe(), tokens_line(state.chosen_tokens))
    tokenizer = load_tokenizer(config.model)
    train_rows, eval_rows = open_rows(config, tokenizer, session)
    total_steps = config.trainer.total_steps(len(train_rows.ids))
    if problems := find_length_conflicts(config, total_steps=total_steps):
        raise ConfigError(problems)
    with ExitStack() as stack:
        trainer = stack.enter_context(open_trainer(config, runtime, session))
        for rows in (train_rows, eval_rows):
            if rows is not None:
                require_vocabulary(rows.store, trainer.sheet)
        if found is not None:
            trainer.load(found.path)
        session.begin(total_steps=total_steps, model_line=describe_model(config, trainer.sheet))
        yield Parts(
            config=config,
            tokenizer=tokenizer,
            train_rows=train_rows,
            eval_rows=eval_rows,
            trainer=trainer,
            profiler=StepProfiler(config.observe.profiler, session.run_dir, device=runtime.device),
            gpus=stack.enter_context(closing(GpuSampler())),
            state=state,
            data_state=found.section("data") if found is not None else None,
            total_steps=total_steps,
        )


def restored_state(found: Found) -> RunState:
    """How far the run had come. The checkpoint's name, its run and its data must agree on that."""
    state = RunState.from_json(found.section("run"), place=str(found.state_file))
    steps = (found.step, state.step, found.section("data").get("step"))
    if len(set(map(repr, steps))) > 1:
        raise CheckpointError(f"{found.state_file}: the steps {steps} should be one and the same.")
    return state


def open_rows(
    config: RunConfig, tokenizer: ChatTokenizer, session: Session
) -> tuple[RowSet, RowSet | None]:
    """The rows to train on and, where there are any, the held-out ones."""
    data = config.data
    store = _prepare(config, tokenizer, session, "train")
    if data.validation:
        held_out = _prepare(config, tokenizer, session, "validation")
        train, evaluation = RowSet.whole(store), RowSet.whole(held_out)
    elif data.validation_share > 0:
        train_ids, held_out_ids = split_rows(store.made_from_B, data.validation_share, config.seed)
        train, evaluation = RowSet(store, train_ids), RowSet(store, held_out_ids)
    else:
        return RowSet.whole(store), None
    return train, RowSet(evaluation.store, evaluation.ids[: config.eval.max_rows])


def _prepare(config: RunConfig, tokenizer: ChatTokenizer, session: Session, which: str) -> RowStore:
    sources = config.data.train if which == "train" else config.data.validation
    cache = config.data.cache_dir
    with progress_of(f"tokenising {which} rows", session.console) as progress:
        store = prepare_rows(
            sources,
            tokenizer,
            config.data,
            cache_dir=session.run_dir.path / "data" if cache is None else Path(cache),
            num_processes=config.data.num_processes,
            progress=progress,
        )
    report = store.report
    log.info(
        "%s rows: %d of %d kept (%d overlong dropped, %d cut, %d unusable), %s tokens, %.0f %% of "
        "them trained",
        which,
        report.kept,
        report.seen,
        report.dropped_overlong,
        report.truncated,
        report.num_bad,
        fmt.count(report.tokens),
        100 * report.trained_tokens / report.tokens,
    )
    counts = {name: value for name, value in report.to_json().items() if "examples" not in name}
    session.event("data_prepared", session.start_step, which=which, **counts)
    return store


@contextmanager
def open_trainer(config: RunConfig, runtime: Runtime, session: Session) -> Iterator[Trainer]:
    """The trainer, and an end to the processes that it may have started."""
    if config.trainer.backend.type == "fsdp":
        log_file = session.run_dir.path / "workers.log"
        trainer = start_sharded(config, runtime, log_file=log_file)
    else:
        trainer = local_trainer(config, runtime)
    with closing(trainer):
        session.event("model_loaded", session.start_step, **trainer.sheet.facts)
        yield trainer


def require_vocabulary(rows: RowStore | PromptSet, sheet: ModelSheet) -> None:
    size = sheet.vocab_size
    if rows.max_token_id >= size:
        raise ModelError(
            f"the tokenizer gives token {rows.max_token_id}, and the model knows tokens below "
            f"{size} (vocab_size). They do not belong together: check model.tokenizer and "
            "model.path, or add the new tokens' rows to the checkpoint's embeddings."
        )


def describe_model(config: RunConfig, sheet: ModelSheet) -> str:
    kind = sheet.source_config.get("model_type", "model")
    text = f"{kind}, {fmt.count(sheet.num_params)} parameters"
    if config.lora is not None:
        text += f", {fmt.count(sheet.num_trainable)} trained (LoRA rank {config.lora.rank})"
    return f"{text}; {config.ranks_line}" if config.ranks_line else text
