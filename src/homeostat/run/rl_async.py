"""Asynchronous reinforcement learning: the engine samples for later steps while the trainer trains.

    step t:  admit the groups of step t + max_staleness -> wait for those of step t -> updates
             -> quiesce the engine -> publish version t -> metrics -> evaluation -> checkpoint

The groups of a step are admitted under version t - 1, as soon as that is published, and trained on
max_staleness steps later, in the order of admission: a group is never overtaken or dropped because
it takes long. So a token is at most max_staleness versions behind the weights that train on it
(stale/steps/max), and its log-probs are those of the version that sampled it.

A publication waits until what is in flight is finished, or cuts it off and lets it continue under
the new weights (rollout.partial). Without partial completions, which weights sample a token does
not depend on timing, and a run is bitwise repeatable. With max_staleness=0 engine and trainer take
turns, and the bits are those of run/rl.py.

Only this thread calls the trainer; the one that samples calls the engine alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from homeostat.config.run import RunConfig
from homeostat.run.evaluation.rl_eval import Evaluation
from homeostat.run.evaluation.rl_measure import async_metrics, rl_metrics
from homeostat.run.publication.completions import groups_of
from homeostat.run.publication.saving import Saver
from homeostat.run.rl_step import RlStep, open_step
from homeostat.run.session.result import result_of
from homeostat.run.session.session import Session
from homeostat.run.session.step import Running, Step
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks
from homeostat.run.wiring.rl_setup import set_up_rl

log = logging.getLogger(__name__)


def train_rl_async(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> Running:
    """Train until the last step, an early stop, or a request to stop. Yields every step."""
    with set_up_rl(config, session) as parts:
        also = [parts.feed, parts.ahead]
        if parts.is_complete:
            log.info("the run is complete at step %d: nothing is left to train", parts.state.step)
            Saver(config.for_saving, parts, session, also=also).add_missing_export(parts.sections())
        else:
            hooks.started(parts, session)
            yield from _loop(open_step(parts, session, also=also), hooks)
            if not parts.is_complete:
                session.watch.require_no_halt()
        return result_of(parts.state, session, total_steps=parts.total_steps)


def _loop(now: RlStep, hooks: Hooks) -> Iterator[Step]:
    parts, state, recorder = now.parts, now.parts.state, now.session.recorder
    config, feed, ahead = parts.config, parts.feed, parts.ahead
    now.evaluate_at_start()
    evaluation = _evaluation_under_way(now)
    now.session.stop.let_steps_finish()
    for step in range(state.step + 1, parts.total_steps + 1):
        started, before = time.perf_counter(), ahead.background.spent
        with ahead.background.exclusively():
            now.begin(step)
        hooks.before_step(step, parts)
        with now.stage("generate and reward", step):
            _admit(now, step)
            filled = ahead.fill()
            rollouts = ahead.collect(step, tell=recorder.status)
        with ahead.background.exclusively():
            compared = now.compare(step, rollouts)
        hooks.before_update(step, parts, rollouts)
        if not config.samples_ahead:
            with ahead.background.exclusively():
                feed.make_room()
        learned = now.learn(step, rollouts)
        hooks.after_update(step, parts)
        state.step = step
        version = config.policy_version(step)
        with now.stage("publish", step):
            feed.stage(version, must=True)
            with ahead.quiesced():
                published = feed.publish(version, must=True)
        now.refresh_reference()
        seconds = time.perf_counter() - started
        metrics = rl_metrics(rollouts, learned, parts=parts, seconds=seconds)
        metrics |= compared | published | filled | now.side_seconds()
        spent = ahead.background.spent - before
        metrics |= async_metrics(rollouts, seconds=seconds, spent=spent)
        metrics |= now.schedule.sampled(rollouts.groups, step=step)
        is_best = False
        if evaluation is not None:
            metrics |= now.judged(evaluation.metrics())[0]
            evaluation = None
        if now.evaluates(step):
            if _waits_for_evaluation(now, step):
                found, is_best = now.evaluated()
                metrics |= found
            else:
                evaluation = Evaluation.begin(parts)
        now.keep(rollouts, learned)
        recorder.log(step, metrics)
        hooks.after_step(step, parts)
        yield Step(step, parts.total_steps, metrics, groups_of(rollouts, learned))
        if now.save(at_end=step == parts.total_steps, is_best=is_best):
            break


def _admit(now: RlStep, step: int) -> None:
    """Admit groups up to those that are trained on max_staleness steps after this one."""
    ahead = now.parts.config.rollout.max_staleness
    assert ahead is not None, "the loop of runs with rollout.max_staleness"
    for later in range(step, min(step + ahead, now.parts.total_steps) + 1):
        now.parts.ahead.admit(later)


def _evaluation_under_way(now: RlStep) -> Evaluation | None:
    """Begin the evaluation again that a run did not wait for when it was left."""
    step, judged_at = now.parts.state.step, now.parts.state.judged_at
    # A run that was complete at this step, and is continued, has waited for the evaluation already.
    if step in (0, judged_at) or not now.evaluates(step) or _waits_for_evaluation(now, step):
        return None
    return Evaluation.begin(now.parts)


def _waits_for_evaluation(now: RlStep, step: int) -> bool:
    # The last step waits for its own, and its record has room for no other.
    return now.parts.config.eval.sampling.blocking or step + 1 >= now.parts.total_steps
