"""Reinforcement learning from verifiable rewards, from recipe to weights.

    prompts -> engine -> groups -> rewards -> journal -> advantages -> updates -> new policy version
            -> metrics -> evaluation -> checkpoint

Everything that happens is in the run directory. A second call on the same directory resumes where
the first stopped, with the same bits: what was sampled and scored is in the journal.
"""

from __future__ import annotations

import logging
import time

from homeostat.config.run import RunConfig
from homeostat.rollout.collect import StepRollouts
from homeostat.run.evaluation.expert_load import step_load
from homeostat.run.evaluation.rl_eval import evaluate_prompts
from homeostat.run.evaluation.rl_measure import replay_metrics, rl_metrics
from homeostat.run.healing.healer import Healer
from homeostat.run.learning.learn import Learned, Learner
from homeostat.run.learning.precision import PrecisionSchedule
from homeostat.run.publication.completions import keep_completions
from homeostat.run.publication.saving import Saver
from homeostat.run.publication.verify_logprobs import LogprobVerifier
from homeostat.run.session.result import RunResult, result_of
from homeostat.run.session.session import Session
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks
from homeostat.run.wiring.remedies import RlActions
from homeostat.run.wiring.rl_setup import RlParts, set_up_rl
from homeostat.train.oom import MemoryGuard
from homeostat.train.step import GuardedStep
from homeostat.types import Role

log = logging.getLogger(__name__)


def train_rl(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> RunResult:
    """Train until the last step, an early stop, or a request to stop."""
    with set_up_rl(config, session) as parts:
        if parts.is_complete:
            log.info("the run is complete at step %d: nothing is left to train", parts.state.step)
            saver = Saver(config.for_saving, parts, session, also=parts.feed)
            saver.add_missing_export(parts.sections())
        elif config.debug is not None and config.debug.mode == "rollout_only":
            _only_sample(parts, session)
        else:
            hooks.started(parts, session)
            _loop(config, parts, session, hooks)
            if not parts.is_complete:
                session.watch.require_no_halt()
        return result_of(parts.state, session, total_steps=parts.total_steps)


def _loop(config: RunConfig, parts: RlParts, session: Session, hooks: Hooks) -> None:
    state, recorder, collector = parts.state, session.recorder, parts.collector
    learner = _learner(parts, session)
    saver = Saver(config.for_saving, parts, session, also=parts.feed)
    verifier = LogprobVerifier(
        parts.live, trainer=parts.trainer, engine=parts.engine, emit=recorder.event
    )
    healer = Healer(
        parts.live,
        watch=session.watch,
        emit=recorder.event,
        actions=RlActions(parts, session),
        healing=session.healing,
    )
    schedule = PrecisionSchedule(parts.live, trainer=parts.trainer, emit=recorder.event)
    if parts.prompts.evaluation and config.eval.at_start and state.step == 0:
        recorder.log(0, _evaluated(parts, session)[0])
    session.stop.let_steps_finish()
    for step in range(state.step + 1, parts.total_steps + 1):
        started = time.perf_counter()
        parts.reward_problems.step = step
        healer.treat(step)
        schedule.begin(step)
        hooks.before_step(step, parts)
        with healer.rescuing(), session.timeline.phase("generate and reward", step=step):
            rollouts = collector.collect(step, tell=recorder.status)
        compared = replay_metrics(parts, rollouts)
        version = config.policy_version(state.step)
        compared |= verifier.verify(rollouts.groups, step=step, version=version)
        hooks.before_update(step, parts, rollouts)
        parts.feed.make_room()
        with (
            healer.rescuing(),
            parts.profiler.around(step, emit=recorder.event),
            session.timeline.phase("train", step=step),
        ):
            rollouts.groups, energies = learner.energies(step, rollouts.groups)
            epoch = int(collector.prompt_sampler.epoch)
            learned = learner.learn(step, rollouts.groups, epoch=epoch, energies=energies)
        hooks.after_update(step, parts)
        state.step = step
        at_end, evaluates = step == parts.total_steps, _evaluates(parts, step)
        # An evaluation is of the weights of its step, whatever the engine samples with otherwise.
        with healer.rescuing(), session.timeline.phase("publish", step=step):
            published = parts.feed.publish(config.policy_version(step), must=evaluates)
        _refresh_reference(parts)
        seconds = time.perf_counter() - started
        metrics = rl_metrics(rollouts, learned, parts=parts, seconds=seconds)
        metrics |= compared | published | _side_seconds(saver, session)
        metrics |= schedule.sampled(rollouts.groups, step=step)
        is_best = False
        if evaluates:
            eval_metrics, is_best = _evaluated(parts, session)
            metrics |= eval_metrics
        _keep(parts, session, rollouts, learned)
        recorder.log(step, metrics)
        hooks.after_step(step, parts)

        at_end = at_end or state.stopped_early
        with session.timeline.phase("checkpoint", step=step):
            saved, last = saver.after_step(parts.sections, at_end=at_end, is_best=is_best)
        if saved and not config.rollout.keep_journal:
            _prune_journal(parts, session)
        if last:
            break


def _evaluates(parts: RlParts, step: int) -> bool:
    """Return whether held-out prompts are answered after a step."""
    is_due = step % parts.config.eval.interval_steps == 0 or step == parts.total_steps
    return parts.prompts.evaluation is not None and is_due


def _side_seconds(saver: Saver, session: Session) -> dict[str, float]:
    """Return the time spent on checkpoints and health since the last step."""
    return {
        "time/checkpoint": saver.take_seconds(),
        "time/health": session.watch.take_seconds(),
    }


def _prune_journal(parts: RlParts, session: Session) -> None:
    """Remove the groups that no resume needs: those of the steps before the last checkpoints."""
    last = session.checkpoints.steps()[-parts.config.checkpoint.keep_last :]
    parts.journal.prune_before(last[0] + 1)


def _learner(parts: RlParts, session: Session) -> Learner:
    config, recorder, state = parts.config, session.recorder, parts.state
    memory = MemoryGuard(
        parts.trainer,
        config.for_trainer,
        run_dir=session.run_dir,
        emit=recorder.event,
        state=state,
    )
    guarded = GuardedStep(
        parts.trainer,
        config.trainer,
        moe=config.model.moe,
        memory=memory,
        origin=lambda row: f"sample {row} of the step",
        run_dir=session.run_dir,
        emit=recorder.event,
        decode=parts.tokenizer.decode,
        state=state,
    )
    return Learner(
        parts.live,
        trainer=parts.trainer,
        guarded=guarded,
        memory=memory,
        state=state,
        rl_state=parts.rl_state,
        total_steps=parts.total_steps,
        tell=recorder.status,
    )


def _refresh_reference(parts: RlParts) -> None:
    choice = parts.config.used_reference
    every = getattr(choice, "refresh_steps", None)
    if every is not None and parts.state.step % every == 0:
        parts.trainer.refresh(Role.REFERENCE)


def _evaluated(parts: RlParts, session: Session) -> tuple[dict[str, float], bool]:
    """The metrics of the held-out prompts, and whether they never earned more."""
    with session.timeline.phase("evaluate", step=parts.state.step):
        metrics = evaluate_prompts(parts)
    if not metrics:
        return {}, False
    state, rules = parts.state, parts.config.eval
    # A gold reward decides where there is one: the policy is not trained on it.
    has_gold = "eval/gold_reward" in metrics
    reward = metrics["eval/gold_reward" if has_gold else "eval/reward"]
    coverage = metrics["eval/gold_coverage" if has_gold else "eval/reward_coverage"]
    if coverage < rules.sampling.min_coverage:
        fields = {"reward": reward, "coverage": coverage, "needed": rules.sampling.min_coverage}
        session.recorder.event("eval_incomplete", state.step, **fields)
        return metrics, False
    is_best = state.judge(reward, min_delta=rules.min_delta, higher_is_better=True)
    session.recorder.event("new_best" if is_best else "eval_done", state.step, reward=reward)
    if rules.patience is not None and state.evals_without_better >= rules.patience:
        state.stopped_early = True
        fields = {"best": state.best_eval, "patience": rules.patience}
        session.recorder.event("early_stop", state.step, **fields)
    return metrics, is_best


def _keep(parts: RlParts, session: Session, rollouts: StepRollouts, learned: Learned) -> None:
    for report in learned.reports:
        session.keep_row_losses(report)
    session.keep_expert_load(parts.state.step, step_load(learned.reports))
    rules = parts.config.observe.completions
    keep_completions(rules, session, rollouts, learned, step=parts.state.step)


def _only_sample(parts: RlParts, session: Session) -> None:
    """debug.mode=rollout_only: what is sampled and scored goes to journal and completions."""
    session.stop.let_steps_finish()
    for step in range(1, parts.total_steps + 1):
        started = time.perf_counter()
        parts.reward_problems.step = step
        parts.trainer.begin_step(step)
        rollouts = parts.collector.collect(step, tell=session.recorder.status)
        parts.state.step = step
        seconds = time.perf_counter() - started
        session.recorder.log(step, rl_metrics(rollouts, Learned(), parts=parts, seconds=seconds))
        _keep(parts, session, rollouts, Learned())
        if session.stop.requested:
            break
