"""The training loop for given rows; an Objective defines what is learnt from them.

    rows -> tokens with loss weights -> packed StepPlans -> accumulate / apply
         -> metrics -> evaluation -> checkpoint

The run directory records everything that happens. A second call on the same directory resumes where
the first one stopped, with bitwise the same results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from homeostat.config.run import RunConfig
from homeostat.run.evaluation.expert_load import step_load
from homeostat.run.evaluation.row_measure import step_metrics
from homeostat.run.healing.healer import Healer
from homeostat.run.learning.precision import PrecisionSchedule, shadow_metrics
from homeostat.run.publication.saving import Saver
from homeostat.run.session.result import result_of
from homeostat.run.session.session import Session
from homeostat.run.session.step import Running, Step
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks
from homeostat.run.wiring.remedies import SftActions
from homeostat.run.wiring.sft_setup import Parts, Prepare, set_up
from homeostat.train.step import GuardedStep

log = logging.getLogger(__name__)


def train_rows(
    config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS, *, prepare: Prepare
) -> Running:
    """Train until the last step, an early stop, or a request to stop. Yields every step."""
    with set_up(config, session, prepare=prepare) as parts:
        if parts.is_complete:
            log.info("the run is complete at step %d: nothing is left to train", parts.state.step)
            Saver(config.for_saving, parts, session).add_missing_export({"data": parts.data_state})
        else:
            hooks.started(parts, session)
            yield from _loop(config, parts, session, hooks)
            if not parts.is_complete:
                session.watch.require_no_halt()
        return result_of(parts.state, session, total_steps=parts.total_steps)


def _loop(config: RunConfig, parts: Parts, session: Session, hooks: Hooks) -> Iterator[Step]:
    state, recorder, objective = parts.state, session.recorder, parts.objective
    guarded = _guarded(config, parts, session)
    saver = Saver(config.for_saving, parts, session)
    healer = Healer(
        parts.live,
        watch=session.watch,
        emit=recorder.event,
        actions=SftActions(parts, session),
        healing=session.healing,
    )
    schedule = PrecisionSchedule.resumed(
        parts.live, trainer=parts.trainer, emit=recorder.event, watch=session.watch
    )
    if parts.eval_rows and config.eval.at_start and state.step == 0:
        recorder.log(0, _evaluated(parts, session, schedule)[0])
    session.stop.let_steps_finish()
    with parts.open_plans() as plans:
        for plan in plans:
            started = time.perf_counter()
            healer.treat(plan.step)
            schedule.begin(plan.step)
            hooks.before_step(plan.step, parts)
            learning_rate = parts.live.now.trainer.learning_rate(plan.step, parts.total_steps)
            with (
                healer.rescuing(),
                parts.profiler.around(plan.step, emit=recorder.event),
                session.timeline.phase("train", step=plan.step),
            ):
                hooks.before_update(plan.step, parts)
                plan = objective.completed(plan, parts.attempts)
                report = guarded.run(plan, learning_rate=learning_rate)
            hooks.after_update(plan.step, parts)
            state.step = plan.step
            state.num_tokens += plan.num_tokens
            seconds = plans.last_wait_s + time.perf_counter() - started
            metrics = step_metrics(plan, report, parts=parts, seconds=seconds)
            metrics |= objective.metrics(plan, report)
            metrics["time/data_wait"] = plans.last_wait_s
            metrics["time/checkpoint"] = saver.take_seconds()
            metrics["time/health"] = session.watch.take_seconds()
            at_end = plan.step == parts.total_steps
            is_best = False
            if parts.eval_rows and (at_end or plan.step % config.eval.interval_steps == 0):
                eval_metrics, is_best = _evaluated(parts, session, schedule)
                metrics |= eval_metrics
            recorder.log(plan.step, metrics)
            session.keep_row_losses(report)
            session.keep_expert_load(plan.step, step_load([report]))
            hooks.after_step(plan.step, parts)
            yield Step(plan.step, parts.total_steps, metrics)
            at_end = at_end or state.stopped_early
            _, last = saver.after_step(
                lambda: {"data": plans.state()}, at_end=at_end, is_best=is_best
            )
            if last:
                break


def _guarded(config: RunConfig, parts: Parts, session: Session) -> GuardedStep:
    return GuardedStep(
        parts.trainer,
        config.trainer,
        moe=config.model.moe,
        memory=parts.attempts.memory,
        origin=parts.train_rows.rows.origin,
        run_dir=session.run_dir,
        emit=session.recorder.event,
        decode=parts.tokenizer.decode,
        state=parts.state,
    )


def _evaluated(
    parts: Parts, session: Session, schedule: PrecisionSchedule
) -> tuple[dict[str, float], bool]:
    """Return the metrics of the held-out rows, and whether they are the best of the run so far."""
    assert parts.eval_rows is not None
    started = time.perf_counter()
    with session.timeline.phase("evaluate", step=parts.state.step):
        metrics = parts.objective.evaluate(parts.eval_rows, parts.attempts)
    if schedule.is_on(parts.state.step):
        with schedule.shadow(parts.state.step):
            shadow = parts.objective.evaluate(parts.eval_rows, parts.attempts)
        metrics |= shadow_metrics(metrics, shadow)
    metrics["time/eval"] = time.perf_counter() - started
    state, loss = parts.state, metrics["eval/loss"]
    is_best = state.judge(loss, min_delta=parts.config.eval.min_delta)
    session.recorder.event("new_best" if is_best else "eval_done", state.step, loss=loss)
    patience = parts.config.eval.patience
    if patience is not None and state.evals_without_better >= patience:
        state.stopped_early = True
        fields = {"best": state.best_eval, "patience": patience}
        session.recorder.event("early_stop", state.step, **fields)
    return metrics, is_best
