"""Reinforcement learning from verifiable rewards, from recipe to weights.

    prompts -> engine -> groups -> rewards -> journal -> advantages -> updates -> new policy version
            -> metrics -> evaluation -> checkpoint

A step samples with the weights of the step before, then trains. run/rl_async.py is the loop that
samples and trains at the same time (rollout.max_staleness).

Everything that happens is in the run directory. A second call on the same directory resumes where
the first stopped, with the same bits: what was sampled and scored is in the journal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from homeostat.config.run import RunConfig
from homeostat.run.evaluation.rl_measure import rl_metrics
from homeostat.run.learning.learn import Learned
from homeostat.run.publication.completions import groups_of
from homeostat.run.publication.saving import Saver
from homeostat.run.rl_step import RlStep, keep_step, open_step
from homeostat.run.session.result import result_of
from homeostat.run.session.session import Session
from homeostat.run.session.step import Running, Step
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks
from homeostat.run.wiring.rl_setup import RlParts, set_up_rl

log = logging.getLogger(__name__)


def train_rl(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> Running:
    """Train until the last step, an early stop, or a request to stop. Yields every step."""
    with set_up_rl(config, session) as parts:
        if parts.is_complete:
            log.info("the run is complete at step %d: nothing is left to train", parts.state.step)
            saver = Saver(config.for_saving, parts, session, also=[parts.feed])
            saver.add_missing_export(parts.sections())
        elif config.debug is not None and config.debug.mode == "rollout_only":
            yield from _only_sample(parts, session)
        else:
            hooks.started(parts, session)
            yield from _loop(open_step(parts, session, also=[parts.feed]), hooks)
            if not parts.is_complete:
                session.watch.require_no_halt()
        return result_of(parts.state, session, total_steps=parts.total_steps)


def _loop(now: RlStep, hooks: Hooks) -> Iterator[Step]:
    parts, state, recorder = now.parts, now.parts.state, now.session.recorder
    config, feed = parts.config, parts.feed
    now.evaluate_at_start()
    now.session.stop.let_steps_finish()
    for step in range(state.step + 1, parts.total_steps + 1):
        started = time.perf_counter()
        now.begin(step)
        hooks.before_step(step, parts)
        with now.stage("generate and reward", step):
            rollouts = parts.collector.collect(step, tell=recorder.status)
        compared = now.compare(step, rollouts)
        hooks.before_update(step, parts, rollouts)
        feed.make_room()
        learned = now.learn(step, rollouts)
        hooks.after_update(step, parts)
        state.step = step
        evaluates = now.evaluates(step)
        # An evaluation is of the weights of its step, whatever the engine samples with otherwise.
        with now.stage("publish", step):
            published = feed.publish(config.policy_version(step), must=evaluates)
        now.refresh_reference()
        seconds = time.perf_counter() - started
        metrics = rl_metrics(rollouts, learned, parts=parts, seconds=seconds)
        metrics |= compared | published | now.side_seconds()
        metrics |= now.schedule.sampled(rollouts.groups, step=step)
        is_best = False
        if evaluates:
            eval_metrics, is_best = now.evaluated()
            metrics |= eval_metrics
        now.keep(rollouts, learned)
        recorder.log(step, metrics)
        hooks.after_step(step, parts)
        yield Step(step, parts.total_steps, metrics, groups_of(rollouts, learned))
        if now.save(at_end=step == parts.total_steps, is_best=is_best):
            break


def _only_sample(parts: RlParts, session: Session) -> Iterator[Step]:
    """Sample and score without training (debug.mode=rollout_only), into journal and completions."""
    session.stop.let_steps_finish()
    for step in range(1, parts.total_steps + 1):
        started = time.perf_counter()
        parts.reward_problems.step = step
        parts.trainer.begin_step(step)
        rollouts = parts.collector.collect(step, tell=session.recorder.status)
        parts.state.step = step
        seconds = time.perf_counter() - started
        metrics = rl_metrics(rollouts, Learned(), parts=parts, seconds=seconds)
        session.recorder.log(step, metrics)
        keep_step(parts, session, rollouts, Learned())
        yield Step(step, parts.total_steps, metrics, groups_of(rollouts, Learned()))
        if session.stop.requested:
            break
