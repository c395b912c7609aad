"""The parts of an RL step that the sync and the async loop share.

Both loops make the same updates from the same groups. They differ in when groups are sampled: see
run/rl.py and run/rl_async.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from homeostat.rollout.collect import StepRollouts
from homeostat.run.evaluation.expert_load import step_load
from homeostat.run.evaluation.rl_eval import evaluate_prompts
from homeostat.run.evaluation.rl_measure import replay_metrics
from homeostat.run.healing.healer import Healer
from homeostat.run.learning.learn import Learned, Learner
from homeostat.run.learning.precision import PrecisionSchedule
from homeostat.run.publication.completions import keep_completions
from homeostat.run.publication.saving import Saved, Saver
from homeostat.run.publication.verify_logprobs import LogprobVerifier
from homeostat.run.session.session import Session
from homeostat.run.wiring.remedies import RlActions
from homeostat.run.wiring.rl_setup import RlParts
from homeostat.train.oom import MemoryGuard
from homeostat.train.step import GuardedStep
from homeostat.types import Role


@dataclass(frozen=True, slots=True)
class RlStep:
    """The stages of a step, as both loops use them."""

    parts: RlParts
    session: Session
    learner: Learner
    saver: Saver
    verifier: LogprobVerifier
    healer: Healer
    schedule: PrecisionSchedule

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Time a stage of a step, and let remedies rescue it."""
        with self.healer.rescuing(), self.session.timeline.phase(name, step=step):
            yield

    def begin(self, step: int) -> None:
        """Try remedies, and change precision where that is due."""
        self.parts.reward_problems.step = step
        self.healer.treat(step)
        self.schedule.begin(step)
        if self.schedule.begins_int4(step):
            self.parts.feed.follow_precision()

    def compare(self, step: int, rollouts: StepRollouts) -> dict[str, float]:
        """Compare what was sampled with other computations of it, where the recipe asks for it."""
        version = self.parts.config.policy_version(self.parts.state.step)
        compared = replay_metrics(self.parts, rollouts)
        return compared | self.verifier.verify(rollouts.groups, step=step, version=version)

    def learn(self, step: int, rollouts: StepRollouts) -> Learned:
        """Make the step's updates."""
        emit = self.session.recorder.event
        with self.stage("train", step), self.parts.profiler.around(step, emit=emit):
            rollouts.groups, energies = self.learner.energies(step, rollouts.groups)
            epoch = int(self.parts.collector.prompt_sampler.epoch)
            return self.learner.learn(step, rollouts.groups, epoch=epoch, energies=energies)

    def evaluates(self, step: int) -> bool:
        """Return whether held-out prompts are answered after a step."""
        parts = self.parts
        is_due = step % parts.config.eval.interval_steps == 0 or step == parts.total_steps
        return parts.prompts.evaluation is not None and is_due

    def evaluate_at_start(self) -> None:
        """Answer held-out prompts before the first step, if the recipe asks for it."""
        parts = self.parts
        if parts.prompts.evaluation and parts.config.eval.at_start and parts.state.step == 0:
            self.session.recorder.log(0, self.evaluated()[0])

    def evaluated(self) -> tuple[dict[str, float], bool]:
        """Answer held-out prompts now. Returns the metrics, and whether they never earned more."""
        with self.session.timeline.phase("evaluate", step=self.parts.state.step):
            return self.judged(evaluate_prompts(self.parts))

    def judged(self, metrics: dict[str, float]) -> tuple[dict[str, float], bool]:
        """Take in an evaluation. Returns it, and whether held-out prompts never earned more."""
        if not metrics:
            return {}, False
        state, rules, event = self.parts.state, self.parts.config.eval, self.session.recorder.event
        # A gold reward decides where there is one: the policy is not trained on it.
        has_gold = "eval/gold_reward" in metrics
        reward = metrics["eval/gold_reward" if has_gold else "eval/reward"]
        coverage = metrics["eval/gold_coverage" if has_gold else "eval/reward_coverage"]
        if coverage < rules.sampling.min_coverage:
            fields = {"reward": reward, "coverage": coverage, "needed": rules.sampling.min_coverage}
            event("eval_incomplete", state.step, **fields)
            return metrics, False
        is_best = state.judge(reward, min_delta=rules.min_delta, higher_is_better=True)
        event("new_best" if is_best else "eval_done", state.step, reward=reward)
        if rules.patience is not None and state.evals_without_better >= rules.patience:
            state.stopped_early = True
            fields = {"best": state.best_eval, "patience": rules.patience}
            event("early_stop", state.step, **fields)
        return metrics, is_best

    def refresh_reference(self) -> None:
        """Replace the reference by the policy, where that is due."""
        every = getattr(self.parts.config.used_reference, "refresh_steps", None)
        if every is not None and self.parts.state.step % every == 0:
            self.parts.trainer.refresh(Role.REFERENCE)

    def side_seconds(self) -> dict[str, float]:
        """Return the time spent on checkpoints and health since the last step."""
        return {
            "time/checkpoint": self.saver.take_seconds(),
            "time/health": self.session.watch.take_seconds(),
        }

    def keep(self, rollouts: StepRollouts, learned: Learned) -> None:
        """Write what people look at: losses of rows, load of experts, completions."""
        keep_step(self.parts, self.session, rollouts, learned)

    def save(self, *, at_end: bool, is_best: bool) -> bool:
        """Save a checkpoint if that is due. Returns whether the run ends here."""
        parts = self.parts
        at_end = at_end or parts.state.stopped_early
        saved, last = self.saver.after_step(parts.sections, at_end=at_end, is_best=is_best)
        if saved and not parts.config.rollout.keep_journal:
            # No resume needs the groups of the steps before the last checkpoints.
            steps = self.session.checkpoints.steps()[-parts.config.checkpoint.keep_last :]
            parts.journal.prune_before(steps[0] + 1)
        return last


def keep_step(parts: RlParts, session: Session, rollouts: StepRollouts, learned: Learned) -> None:
    """Write losses of rows, load of experts and completions of a step."""
    for report in learned.reports:
        session.keep_row_losses(report)
    session.keep_expert_load(parts.state.step, step_load(learned.reports))
    rules = parts.config.observe.completions
    keep_completions(rules, session, rollouts, learned, step=parts.state.step)


def open_step(parts: RlParts, session: Session, *, also: Sequence[Saved]) -> RlStep:
    """Return the parts of a loop; checkpoints hold the state of `also`, too."""
    config, emit = parts.config, session.recorder.event
    return RlStep(
        parts=parts,
        session=session,
        learner=_learner(parts, session),
        saver=Saver(config.for_saving, parts, session, also=also),
        verifier=LogprobVerifier(parts.live, trainer=parts.trainer, engine=parts.engine, emit=emit),
        healer=Healer(
            parts.live,
            watch=session.watch,
            emit=emit,
            actions=RlActions(parts, session),
            healing=session.healing,
        ),
        schedule=PrecisionSchedule.resumed(
            parts.live, trainer=parts.trainer, emit=emit, watch=session.watch
        ),
    )


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
