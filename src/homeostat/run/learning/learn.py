"""Turns the groups of a step into updates of the policy.

groups -> rows -> log-probs of reference and old policy, where needed; values of a critic
       -> advantages
       -> updates of policy and critic, guarded against memory and numbers that are not finite
       -> how far engine and trainer were apart
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from homeostat.algorithms.catalogue import advantages, policy_gradient
from homeostat.algorithms.energy import Energies
from homeostat.algorithms.kl import ESTIMATORS, next_coefficient
from homeostat.arrays import FloatArray, IntArray
from homeostat.config.algorithm import AnyPolicyGradient
from homeostat.config.loading.live import LiveConfig
from homeostat.config.parts import LearningSettings
from homeostat.errors import TrainingHaltedError
from homeostat.run.learning.coverage import num_trained, scaled_up, some_of, together
from homeostat.run.learning.critic import CriticLearner, CriticStep
from homeostat.run.learning.energies import scored_groups, truth_rows
from homeostat.run.learning.kept import require_kept
from homeostat.run.learning.mismatch import WorstToken, compare, known_logp, with_text
from homeostat.run.learning.passes import Passes, by_row, numbered
from homeostat.run.learning.penalties import kl_penalties
from homeostat.run.learning.probes import (
    NUM_SCORED,
    ScoredAgain,
    last_packed,
    plan_probes,
    round_trip_bad,
)
from homeostat.run.learning.routes import require_routes, rows_for
from homeostat.run.learning.updates import (
    StepRows,
    Update,
    build_update,
    epoch_spans,
    reward_batch,
    rows_of_groups,
    split_groups,
    step_rows,
    with_column,
)
from homeostat.run.sizing.token_budget import current_sizes
from homeostat.train.oom import MemoryGuard
from homeostat.train.probes import is_measured
from homeostat.train.saving.run_state import RlState, RunState
from homeostat.train.scoring import score
from homeostat.train.step import GuardedStep
from homeostat.train.trainer import Trainer
from homeostat.types import (
    Role,
    RolloutGroup,
    StepPlan,
    TokenRow,
    TrainBatch,
    UpdateReport,
)

# Number of rows that a step without updates scores, so that engine and trainer are still compared.
NUM_COMPARED = 16
# Steps from one event about the worst tokens to the next.
STEPS_BETWEEN_WORST = 20

# Reports the progress of a step to the user: (text, done, total).
Tell = Callable[[str, int, int], None]


@dataclass(slots=True)
class Learned:
    """The results of a step's updates."""

    advantages_S: list[np.ndarray] = field(default_factory=list)
    rows: StepRows | None = None
    reports: list[UpdateReport] = field(default_factory=list)
    energies: Energies | None = None
    # For each update that has rows: the measurements of its loss over all rows
    # (run/learning/coverage.py).
    measured: list[Mapping[str, float]] = field(default_factory=list)
    num_without_signal: int = 0
    trained_tokens: int = 0
    critic: CriticStep | None = None
    kl: float | None = None
    # Comparison of engine and trainer at the start of the step: metrics, and the largest
    # differences.
    mismatch: Mapping[str, float] = field(default_factory=dict)
    worst_tokens: tuple[WorstToken, ...] = ()
    # Per sample and token, the trainer's log-prob less the engine's; empty if none was compared.
    logp_differences_ST: list[FloatArray] = field(default_factory=list)
    # For each update: the results of the invariant checks.
    probes: list[Mapping[str, float]] = field(default_factory=list)
    score_s: float = 0.0
    train_s: float = 0.0


class Learner:
    """Turns groups into updates of the policy."""

    def __init__(
        self,
        live: LiveConfig,
        *,
        trainer: Trainer,
        guarded: GuardedStep,
        memory: MemoryGuard,
        state: RunState,
        rl_state: RlState,
        total_steps: int,
        tell: Tell,
    ) -> None:
        self.live = live
        self.trainer = trainer
        self.guarded = guarded
        self.memory = memory
        self.state = state
        self.rl_state = rl_state
        self.total_steps = total_steps
        self.tell = tell
        self.passes = Passes(live, trainer, memory, state)
        self.critic: CriticLearner | None = None
        if live.now.critic is not None:
            self.critic = CriticLearner(self.passes, guarded, total_steps=total_steps)
        self._worst_told_at: int | None = None

    @property
    def config(self) -> LearningSettings:
        """Return the settings in force."""
        return self.live.now.for_learning

    @property
    def algorithm(self) -> AnyPolicyGradient:
        """Return the algorithm's settings in force."""
        return policy_gradient(self.config.algorithm)

    def energies(
        self, step: int, groups: Sequence[RolloutGroup]
    ) -> tuple[list[RolloutGroup], Energies | None]:
        """Return the groups with their energies as rewards, and these, if the run has any."""
        trainer, run = self.trainer, self.passes.run
        return scored_groups(groups, self.config.energy, trainer=trainer, run=run, step=step)

    def learn(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        *,
        epoch: int,
        energies: Energies | None = None,
    ) -> Learned:
        kl = self.algorithm.kl
        if kl is not None and kl.target is None:
            # Without a target the coefficient is the setting, which may have changed.
            self.rl_state.kl_coefficient = kl.coefficient
        learned = Learned()
        if not groups:
            return learned
        started = time.perf_counter()
        require_routes(groups, self.config.model.moe, self.trainer.sheet.moe)
        require_kept(groups)
        rows = step_rows(groups, self.config)
        spans = split_groups(len(groups), self.config.trainer.updates_per_step)
        penalty_ST = self._score(rows, spans, step, learned)
        learned.rows, learned.energies = rows, energies
        self._estimate(rows, groups, penalty_ST, step, learned)
        learned.score_s = time.perf_counter() - started
        started = time.perf_counter()
        if step > self.config.critic_steps:
            self._update_policy(step, epoch, groups, learned)
        if self.critic is not None and learned.critic is not None:
            self.tell("updating the critic", 1, 1)
            self.critic.learn(learned.critic, rows, step=step, epoch=epoch)
        learned.train_s = time.perf_counter() - started
        self._compare(step, groups, spans, learned)
        self._adapt_kl(learned, num_samples=len(rows.rows))
        return learned

    def _estimate(
        self,
        rows: StepRows,
        groups: Sequence[RolloutGroup],
        penalty_ST: list[np.ndarray] | None,
        step: int,
        learned: Learned,
    ) -> None:
        """Compute the advantages and, where there is a critic, what it is trained towards."""
        critic = self.critic
        values = None if critic is None else critic.values(rows, groups, step=step)
        batch = reward_batch(rows, penalty_ST=penalty_ST, critic=values, energies=learned.energies)
        learned.advantages_S = advantages(self.algorithm, batch)
        if critic is not None and values is not None:
            learned.critic = critic.targets(values, batch)

    def _update_policy(
        self, step: int, epoch: int, groups: Sequence[RolloutGroup], learned: Learned
    ) -> None:
        """Make the step's updates of the policy: passes over its samples, in updates each."""
        trainer = self.config.trainer
        for number in range(trainer.epochs_per_step):
            shuffle = (self.config.seed, step, number)
            spans = epoch_spans(len(groups), trainer.updates_per_step, shuffle=shuffle)
            for update, chosen in enumerate(spans):
                place = number * trainer.updates_per_step + update
                self.tell("updating", place + 1, trainer.updates_in_step)
                self._update(step, place, chosen, epoch, groups, learned)

    def _update(
        self,
        step: int,
        place: int,
        chosen: IntArray,
        epoch: int,
        groups: Sequence[RolloutGroup],
        learned: Learned,
    ) -> None:
        rows = learned.rows
        assert rows is not None, "rows come first"
        kl, trained = self.algorithm.kl, [groups[index] for index in chosen]
        built = build_update(
            rows,
            learned.advantages_S,
            chosen=rows_of_groups(rows, chosen),
            config=self.config,
            sizes=current_sizes(self.config.trainer, self.state),
            kl_coefficient=self.rl_state.kl_coefficient if kl and kl.place == "loss" else None,
            step=step,
            epoch=epoch,
            truth=truth_rows(trained, self.config.energy, first_id=len(rows.rows)),
        )
        plan, others = built.plan, self._measure_left_out(built, step)
        if plan is None:
            learned.num_without_signal += 1
            if others is not None:
                learned.measured.append(others)
            return
        per_step, first = self.config.trainer.updates_in_step, self.config.critic_steps
        number = (step - first - 1) * per_step + place + 1
        total = (self.total_steps - first) * per_step
        rate = self.config.trainer.learning_rate(number, total)
        before = self._score_again(plan, step, len(rows.rows)) if place == 0 else ScoredAgain()
        report = self.guarded.run(plan, learning_rate=rate)
        learned.reports.append(report)
        learned.measured.append(report.stats if others is None else together(report, others))
        learned.trained_tokens += plan.num_tokens
        probes = plan_probes(plan, report)
        probes["probe/round_trip_bad"] = round_trip_bad(groups, rows, plan)
        learned.probes.append({**probes, **before.compared(report)})

    def _measure_left_out(self, built: Update, step: int) -> Mapping[str, float] | None:
        """Measure the loss on rows that the update leaves out, before it is made.

        See `run/learning/coverage.py`. Returns None if there are none.
        """
        rows, loss = some_of(built.left_out), built.loss
        if not rows:
            return None
        assert loss is not None, "rows that are left out have a weight in the loss"
        _, found = self.passes.run(
            Role.POLICY,
            rows,
            lambda batches: self.trainer.measure(Role.POLICY, batches, loss),
            step=step,
        )
        return scaled_up(found, num_tokens=sum(map(num_trained, built.left_out)))

    def _score_again(self, plan: StepPlan, step: int, num_rows: int) -> ScoredAgain:
        """Score a few sampled rows of the first update before it, at measured steps."""
        rows = [row for batch in plan.micro_batches for row in batch.rows()]
        rows = [row for row in rows if row.row_id < num_rows][:NUM_SCORED]
        if not rows or not is_measured(step):
            return ScoredAgain()
        found = self._logprobs(Role.POLICY, rows, step=step)
        together = {row.row_id: logp_M for row, logp_M in zip(rows, found, strict=True)}
        lone = last_packed(plan)
        # Rows that share prefixes are not packed; each data group would need a separate row.
        apart = not self.live.now.is_strided and self.trainer.num_data_groups == 1
        if lone is None or lone.row_id >= num_rows or not apart:
            return ScoredAgain(together)
        (alone_M,) = self._logprobs(Role.POLICY, [lone], step=step)
        return ScoredAgain(together, {lone.row_id: alone_M})

    def _score(
        self, rows: StepRows, spans: list[range], step: int, learned: Learned
    ) -> list[np.ndarray] | None:
        """Fill the columns that come from another forward pass; the KL penalty, if in rewards."""
        kl = self.algorithm.kl
        in_reward = kl is not None and kl.place == "reward"
        # A penalty in the reward counts in the group's statistics, also of rows not trained.
        chosen_S = rows.trained_S | (in_reward & ~np.isnan(rows.rewards_S) & (rows.lengths_S > 0))
        chosen = np.flatnonzero(chosen_S[rows.sample_R]).tolist()
        # If all completions were cut or all rewards failed, there is nothing to score.
        if kl is not None and chosen:
            self._fill("ref_logp", Role.REFERENCE, rows, chosen, step)
        correction = self.algorithm.correction
        all_old = in_reward or (correction is not None and correction.normalise)
        all_old = all_old or self.config.trainer.epochs_per_step > 1
        later = [index for index in chosen if all_old or rows.group_R[index] >= spans[0].stop]
        if later and (in_reward or step > self.config.critic_steps):
            self._fill("old_logp", Role.POLICY, rows, later, step)
        if kl is None or not in_reward:
            return None
        coefficient = self.rl_state.kl_coefficient
        assert coefficient is not None, "a run with a KL term has a coefficient"
        estimator = ESTIMATORS[kl.estimator]
        penalty_ST, learned.kl = kl_penalties(rows, estimator, coefficient=coefficient)
        return penalty_ST

    def _compare(
        self, step: int, groups: Sequence[RolloutGroup], spans: list[range], learned: Learned
    ) -> None:
        """Compare the engine's log-probs with the trainer's, even if the step made no update."""
        rows, debug = learned.rows, self.live.now.debug
        assert rows is not None, "rows come first"
        known = known_logp(rows, learned.reports) or self._score_some(rows, step)
        is_foreign = debug is not None and debug.rollouts is not None
        compared = compare(
            groups,
            rows,
            known,
            spans=spans,
            updates_per_step=self.config.trainer.updates_in_step,
            version=None if is_foreign else self.live.now.policy_version(self.state.step),
        )
        learned.mismatch, learned.worst_tokens = compared.metrics, compared.worst
        learned.logp_differences_ST = compared.differences_ST
        told_at = self._worst_told_at
        if compared.notable and (told_at is None or step >= told_at + STEPS_BETWEEN_WORST):
            self._tell_worst(step, rows, compared.worst)

    def _score_some(self, rows: StepRows, step: int) -> dict[int, FloatArray]:
        """Log-probs of a few rows of a step that updated nothing."""
        some = [index for index, row in enumerate(rows.rows) if row.weights_T.any()]
        some = some[:NUM_COMPARED]
        if not some:
            return {}
        found = self._logprobs(Role.POLICY, [rows.rows[index] for index in some], step=step)
        return dict(zip(some, found, strict=True))

    def _tell_worst(self, step: int, rows: StepRows, worst: Sequence[WorstToken]) -> None:
        self._worst_told_at = step
        tokens = with_text(worst, rows, decode=self.guarded.decode)
        first = tokens[0]
        self.guarded.emit(
            "worst_tokens",
            step,
            text=first["text"],
            engine_logp=first["engine_logp"],
            trainer_logp=first["trainer_logp"],
            tokens=tokens,
        )

    def _fill(
        self, name: str, role: Role, rows: StepRows, chosen: Sequence[int], step: int
    ) -> None:
        found = self._logprobs(role, [rows.rows[index] for index in chosen], step=step)
        if role is Role.REFERENCE and not all(np.isfinite(values).all() for values in found):
            raise TrainingHaltedError(
                f"step {step}: the reference computed log-probs that are not finite, so no KL can "
                "be measured. Check the files of reference.path (or else of model.path and "
                "lora.path)."
            )
        for index, values in zip(chosen, found, strict=True):
            rows.rows[index] = with_column(rows.rows[index], name, values)

    def _logprobs(self, role: Role, rows: list[TokenRow], *, step: int) -> list[FloatArray]:
        """Per row, the log-probs of its trained tokens at the sampling temperature."""
        temperature = self.config.rollout.temperature
        # Some rows may have more columns than others at this point.
        alike = numbered(rows_for(role, rows, self.config.model.moe))

        def work(batches: Sequence[TrainBatch]) -> list[np.ndarray]:
            return score(self.trainer, role, batches, temperature=temperature)

        batches, found = self.passes.run(role, alike, work, step=step)
        logp = by_row(batches, found)
        return [logp[index] for index in range(len(rows))]

    def _adapt_kl(self, learned: Learned, *, num_samples: int) -> None:
        kl = self.algorithm.kl
        if kl is None:
            return
        if kl.place == "loss":
            sums = [report.stats for report in learned.reports]
            tokens = sum(stats["tokens"] for stats in sums)
            learned.kl = sum(stats["kl"] for stats in sums) / tokens if tokens else None
        if kl.target is not None and learned.kl is not None:
            assert self.rl_state.kl_coefficient is not None, "set at the start"
            self.rl_state.kl_coefficient = next_coefficient(
                self.rl_state.kl_coefficient,
                kl=learned.kl,
                target=kl.target,
                horizon=kl.horizon,
                num_samples=num_samples,
            )
