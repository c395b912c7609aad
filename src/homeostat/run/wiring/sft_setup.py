"""Build the parts of a run over given rows: rows, trainer, and the state to resume from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from homeostat.algorithms.row_loss import row_loss
from homeostat.config.combinations.check import count_steps
from homeostat.config.loading.live import LiveConfig
from homeostat.config.run import RunConfig
from homeostat.data.inputs import Inputs, RowSet
from homeostat.data.loader import PlanLoader
from homeostat.data.store import RowStore
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.errors import CheckpointError
from homeostat.models.build import ModelSheet
from homeostat.observe import format as fmt
from homeostat.observe.devices import GpuSampler
from homeostat.run.learning.attempts import Attempts
from homeostat.run.learning.objective import Objective
from homeostat.run.session.session import Session
from homeostat.run.sizing.token_budget import choose_tokens, sized, tokens_line
from homeostat.run.wiring.inputs import open_rows, require_vocabulary
from homeostat.run.wiring.loading import load_checkpoint
from homeostat.train.build import local_trainer
from homeostat.train.inspection.profile import StepProfiler
from homeostat.train.oom import MemoryGuard
from homeostat.train.runtime import Runtime, resolve_runtime
from homeostat.train.saving.checkpoint import Found
from homeostat.train.saving.run_state import RunState
from homeostat.train.sharded import start_sharded
from homeostat.train.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that the training loop works with."""

    config: RunConfig
    live: LiveConfig
    tokenizer: ChatTokenizer
    train_rows: RowSet[RowStore]
    eval_rows: RowSet[RowStore] | None
    trainer: Trainer
    attempts: Attempts
    objective: Objective
    profiler: StepProfiler
    gpus: GpuSampler
    state: RunState
    data_state: dict[str, Any] | None
    total_steps: int

    @property
    def is_complete(self) -> bool:
        return self.state.step >= self.total_steps or self.state.stopped_early

    def open_plans(self) -> PlanLoader:
        """Return the plans of the steps that are left."""
        config = self.config
        return PlanLoader(
            self.train_rows.rows,
            row_ids=self.train_rows.ids,
            trainer=sized(config.trainer, self.state),
            data=config.data,
            loss=row_loss(config.algorithm, preference=config.preference, data=config.data),
            seed=config.seed,
            num_data_groups=self.trainer.num_data_groups,
            state=self.data_state,
        )


# Makes the rows ready for what is learnt from them, while the policy is as it starts, and returns
# how it is learnt.
Prepare = Callable[[Inputs[RowStore], Attempts, Session], tuple[Inputs[RowStore], Objective]]


@contextmanager
def set_up(config: RunConfig, session: Session, *, prepare: Prepare) -> Iterator[Parts]:
    """Yield the parts of the run. On exit, end the processes and threads that they started."""
    found = session.resume.found
    state, runtime = begin_state(config, session)
    tokenizer = load_tokenizer(config.model)
    inputs = open_rows(config.for_inputs, tokenizer, session)
    total_steps = count_steps(config, len(inputs.train))
    with ExitStack() as stack:
        trainer = stack.enter_context(open_trainer(config, runtime, session))
        require_vocabulary(inputs, vocab_size=trainer.sheet.vocab_size)
        memory = MemoryGuard(
            trainer,
            config.for_trainer,
            run_dir=session.run_dir,
            emit=session.event,
            state=state,
        )
        attempts = Attempts(config.for_rows, trainer, state, memory)
        inputs, objective = prepare(inputs, attempts, session)
        load_checkpoint(trainer, config, found)
        session.begin(total_steps=total_steps, model_line=describe_model(config, trainer.sheet))
        yield Parts(
            config=config,
            live=LiveConfig(config),
            tokenizer=tokenizer,
            train_rows=inputs.train,
            eval_rows=inputs.evaluation,
            trainer=trainer,
            attempts=attempts,
            objective=objective,
            profiler=StepProfiler(config.observe.profiler, session.run_dir, device=runtime.device),
            gpus=stack.enter_context(closing(GpuSampler())),
            state=state,
            data_state=found.section("data") if found is not None else None,
            total_steps=total_steps,
        )


def begin_state(config: RunConfig, session: Session) -> tuple[RunState, Runtime]:
    """Return the run's state, new or restored, and its device, dtype and threads."""
    found = session.resume.found
    state = _restored_state(found) if found is not None else RunState()
    runtime = resolve_runtime(config, kept=state.way)
    state.way = runtime.way
    state.chosen_tokens = choose_tokens(config, runtime, kept=state.chosen_tokens)
    log.info("training on %s%s", runtime.describe(), tokens_line(state.chosen_tokens))
    return state, runtime


def _restored_state(found: Found) -> RunState:
    """Return the run's state from a checkpoint, whose sections must agree on the step."""
    state = RunState.from_json(found.section("run"), place=str(found.state_file))
    steps = (found.step, state.step, found.section("data").get("step"))
    if len(set(map(repr, steps))) > 1:
        raise CheckpointError(f"{found.state_file}: the steps {steps} should all be the same.")
    return state


@contextmanager
def open_trainer(config: RunConfig, runtime: Runtime, session: Session) -> Iterator[Trainer]:
    """Yield the trainer. On exit, end the processes that it may have started."""
    if config.trainer.backend.type == "fsdp":
        log_file = session.run_dir.path / "workers.log"
        trainer = start_sharded(
            config.for_trainer, runtime, log_file=log_file, on_span=session.timeline.add
        )
    else:
        trainer = local_trainer(config.for_trainer, runtime)
    with closing(trainer):
        session.event("model_loaded", session.start_step, **trainer.sheet.facts)
        yield trainer


def describe_model(config: RunConfig, sheet: ModelSheet) -> str:
    """Return the line that the view shows about the model."""
    kind = sheet.source_config.get("model_type", "model")
    text = f"{kind}, {fmt.count(sheet.num_params)} parameters"
    if config.lora is not None:
        text += f", {fmt.count(sheet.num_trainable)} trained (LoRA rank {config.lora.rank})"
    if "precision" in sheet.facts:
        text += f"; {sheet.facts['precision']}"
    return f"{text}; {config.ranks_line}" if config.ranks_line else text
