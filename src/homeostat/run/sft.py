"""Supervised fine-tuning, from recipe to weights.

    rows -> tokens with loss weights -> packed StepPlans -> accumulate / apply
         -> metrics -> evaluation -> checkpoint

Everything that happens is in the run directory; a second call on the same directory goes on where
the first stopped, to the same bits.
"""

from __future__ import annotations

import logging
import time

from homeostat.config.run import RunConfig
from homeostat.run.measure import evaluate, step_metrics
from homeostat.run.saving import Saver
from homeostat.run.session import Session
from homeostat.run.setup import Parts, set_up
from homeostat.train.step import GuardedStep

log = logging.getLogger(__name__)


def train_sft(config: RunConfig, session: Session) -> None:
    """Train until the last step, an early stop, or a request to stop."""
    parts = set_up(config, session)
    state, recorder = parts.state, session.recorder
    if state.step >= parts.total_steps or state.stopped_early:
        log.info("the run is complete at step %d: nothing is left to do", state.step)
        return
    guarded = GuardedStep(
        parts.trainer,
        config,
        store=parts.rows,
        run_dir=session.run_dir,
        emit=recorder.event,
        decode=parts.tokenizer.decode,
        state=state,
    )
    saver = Saver(config, parts, session)
    with parts.open_plans() as plans:
        for plan in plans:
            started = time.perf_counter()
            learning_rate = config.trainer.learning_rate(plan.step, parts.total_steps)
            with parts.profiler.around(plan.step, emit=recorder.event):
                report = guarded.run(plan, learning_rate=learning_rate)
            state.step = plan.step
            state.num_tokens += plan.num_tokens
            seconds = plans.last_wait_s + time.perf_counter() - started
            metrics = step_metrics(plan, report, parts=parts, seconds=seconds)
            recorder.log(plan.step, metrics | {"time/data_wait": plans.last_wait_s})
            session.keep_row_losses(report)

            at_end = plan.step == parts.total_steps
            is_best = False
            if config.has_validation and (at_end or plan.step % config.eval.interval_steps == 0):
                is_best = _evaluate(config, parts, session)
            at_end = at_end or state.stopped_early
            stopping = session.stop.requested
            due = plan.step % config.checkpoint.interval_steps == 0
            if at_end or stopping or due or (is_best and config.eval.keep_best):
                saver.save(plans.state(), is_best=is_best, at_end=at_end, must=at_end or stopping)
            if at_end or stopping:
                break


def _evaluate(config: RunConfig, parts: Parts, session: Session) -> bool:
    """Score the held-out rows; True when they never scored better."""
    started = time.perf_counter()
    loss = evaluate(parts, config)
    seconds = time.perf_counter() - started
    step, state = parts.state.step, parts.state
    is_best = state.judge(loss, min_delta=config.eval.min_delta)
    session.recorder.log(step, {"eval/loss": loss, "time/eval": seconds})
    session.recorder.event("eval_done", step, loss=loss, best=is_best)
    patience = config.eval.patience
    if patience is not None and state.evals_without_better >= patience:
        state.stopped_early = True
        session.recorder.event("early_stop", step, best_loss=state.best_loss, patience=patience)
    return is_best
