"""From scored groups to optimizer updates.

    groups -> rewards -> advantages -> rows with columns -> updates -> micro-batches

Groups stay whole: update u of U gets groups [u P / U, (u + 1) P / U). Weights and denominator of
the loss are those of the whole update. The first update of a step needs no old log-probs: its own
log-probs are the old ones, so the ratio is exactly 1.

A sample may have several rows (turns, a context that was compacted). Data of a sample are found by
explicit indices, never by a row's number: `sample_R` says whose row it is, `places` which token of
the sample each token of the row is. Suffixes: `_R` rows, `_S` samples of the step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from homeostat.algorithms.baselines import CriticValues, RewardBatch
from homeostat.algorithms.catalogue import advantages, policy_gradient
from homeostat.algorithms.corrections.weight import WeightRule, mean_weight
from homeostat.algorithms.energy import Energies
from homeostat.algorithms.losses import loss_of
from homeostat.algorithms.normalise import row_weights
from homeostat.algorithms.overlong import penalty as overlong_penalty
from homeostat.algorithms.policy import policy_spec
from homeostat.arrays import BoolArray, FloatArray64, IntArray
from homeostat.columns import ROUTES, TRUTH, ColumnArray, aligned, dense, joined
from homeostat.config.ebft import EbftConfig
from homeostat.config.parts import LearningSettings
from homeostat.config.trainer import TrainerConfig
from homeostat.data.loader import micro_batches
from homeostat.data.prepare import shuffled
from homeostat.run.learning.energies import beside
from homeostat.train.replay import REPLAYED
from homeostat.types import (
    Completion,
    LossSpec,
    Prompt,
    RolloutGroup,
    Sample,
    StepPlan,
    TokenRow,
)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The samples of a step as training rows; samples are in the groups' order.

    Of each row: `sample_R` is its sample's number in the step. `places[row]` says of each token
    where it stands in the sample's prompt followed by its completion; -1 if in neither. Weights are
    1 for the tokens that the row trains, all of which the policy sampled, and 0 for the prompt and
    for what a tool or user wrote. `engine_logp` is a column of every row.

    Of each sample: `starts_S` is the length of its prompt, `lengths_S` counts the policy's tokens,
    and `policy_numbers[sample]` numbers them: -1 for all other tokens of prompt and completion.
    """

    rows: list[TokenRow]
    sample_R: IntArray
    places: list[IntArray]
    group_S: IntArray
    starts_S: IntArray
    policy_numbers: list[IntArray]
    lengths_S: IntArray
    rewards_S: FloatArray64
    trained_S: BoolArray
    penalty_S: FloatArray64

    @property
    def group_R(self) -> IntArray:
        return self.group_S[self.sample_R]

    @property
    def num_groups(self) -> int:
        return int(self.group_S.max(initial=-1)) + 1

    def completion_places(self, row: int) -> IntArray:
        """Return each token's position in the sample's completion; below 0 if not in it."""
        return self.places[row] - self.starts_S[self.sample_R[row]]

    def policy_places(self, row: int) -> IntArray:
        """Number of each token of a row among those of its sample that the policy sampled; -1 for
        all others."""
        places_T = self.places[row]
        return np.where(places_T >= 0, self.policy_numbers[self.sample_R[row]][places_T], -1)


def step_rows(groups: Sequence[RolloutGroup], config: LearningSettings) -> StepRows:
    """Rows that can be scored; the reward of an overlong sample is shaped here."""
    samples = [sample for group in groups for sample in group.samples]
    group_S = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
    prompts = [groups[int(group)].prompt for group in group_S]
    unread = set(ROUTES) - set(REPLAYED[config.model.moe.router_replay])
    rows = _rows(prompts, samples, unread=unread)
    rewards = [math.nan if s.reward is None else s.reward for s in samples]
    penalty_S = np.array([_shaping(sample, config) for sample in samples])
    masks_overlong = policy_gradient(config.algorithm).overlong.type == "mask"
    trained = [
        s.reward is not None
        and s.completion.num_policy_tokens > 0
        and not (masks_overlong and s.completion.stop_reason.is_cut)
        for s in samples
    ]
    return StepRows(
        rows=rows,
        sample_R=np.arange(len(samples)),
        places=[np.arange(len(row)) for row in rows],
        group_S=group_S,
        starts_S=np.array([len(prompt.tokens_T) for prompt in prompts], dtype=np.int64),
        policy_numbers=[_numbered(row.weights_T > 0) for row in rows],
        lengths_S=np.array([s.completion.num_policy_tokens for s in samples], dtype=np.int64),
        rewards_S=np.array(rewards) + penalty_S,
        trained_S=np.array(trained),
        penalty_S=penalty_S,
    )


def _rows(
    prompts: Sequence[Prompt], samples: Sequence[Sample], *, unread: Collection[str]
) -> list[TokenRow]:
    """Return one row per sample: prompt, then completion. Columns in `unread` are left out."""
    pairs = zip(prompts, samples, strict=True)
    found = [_columns(p, s.completion, unread=unread) for p, s in pairs]
    lengths = [len(p.tokens_T) + len(s.completion) for p, s in zip(prompts, samples, strict=True)]
    return [
        TokenRow(
            row_id=number,
            tokens_T=np.concatenate([prompt.tokens_T, sample.completion.tokens_T]),
            weights_T=np.concatenate(
                [np.zeros(len(prompt.tokens_T), bool), sample.completion.by_policy_T]
            ).astype(np.float32),
            columns=columns,
        )
        for number, (prompt, sample, columns) in enumerate(
            zip(prompts, samples, aligned(found, lengths=lengths), strict=True)
        )
    ]


def _columns(
    prompt: Prompt, completion: Completion, *, unread: Collection[str]
) -> dict[str, ColumnArray]:
    """Return the columns that the engine recorded for the tokens of a prompt and completion."""
    lengths = (len(prompt.tokens_T), len(completion))
    # Tokens that a tool or user wrote have no log-prob.
    engine_logp_T = np.where(completion.by_policy_T, completion.sampled_logp_T, np.float32(0))
    of_completion = {"engine_logp": engine_logp_T, **completion.columns}
    parts = [
        {name: values for name, values in columns.items() if name not in unread}
        for columns in (completion.prompt_columns, of_completion)
    ]
    return joined(parts, lengths=lengths)


def _numbered(chosen_T: BoolArray) -> IntArray:
    """Number the chosen tokens from 0; -1 for all others."""
    return np.where(chosen_T, np.cumsum(chosen_T) - 1, -1)


def _shaping(sample: Sample, config: LearningSettings) -> float:
    overlong = policy_gradient(config.algorithm).overlong
    if overlong.type != "shape":
        return 0.0
    return overlong_penalty(
        sample.completion.num_policy_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        buffer_tokens=overlong.buffer(config.rollout.max_new_tokens),
        penalty=overlong.penalty,
    )


def step_advantages(
    step: StepRows,
    config: LearningSettings,
    *,
    penalty_ST: list[np.ndarray] | None,
    energies: Energies | None = None,
) -> list[np.ndarray]:
    """Per sample, one value for each token that the policy sampled."""
    batch = reward_batch(step, penalty_ST=penalty_ST, energies=energies)
    return advantages(policy_gradient(config.algorithm), batch)


def reward_batch(
    step: StepRows,
    *,
    penalty_ST: list[np.ndarray] | None,
    critic: CriticValues | None = None,
    energies: Energies | None = None,
) -> RewardBatch:
    """Collect the inputs of the advantages.

    `penalty_ST` is the KL in the reward, times its weight, for each token that the policy sampled;
    `critic` has the values of the same tokens.
    """
    return RewardBatch(
        rewards_S=step.rewards_S,
        group_S=step.group_S,
        lengths_S=step.lengths_S,
        trained_S=step.trained_S,
        penalty_ST=penalty_ST,
        critic=critic,
        energies=energies,
    )


def split_groups(num_groups: int, num_updates: int) -> list[range]:
    """Return the groups of each update. There are fewer updates if there are fewer groups."""
    borders = [update * num_groups // num_updates for update in range(num_updates + 1)]
    spans = [range(*pair) for pair in pairwise(borders)]
    return [span for span in spans if len(span)]


def epoch_spans(
    num_groups: int, num_updates: int, *, shuffle: tuple[int, int, int]
) -> list[IntArray]:
    """Groups of each update of one pass over the samples of a step.

    `shuffle` is (seed, step, pass). The first pass, 0, takes the groups as they come; every other
    one in another order, so that updates are made of other groups.
    """
    order = np.arange(num_groups)
    if shuffle[-1] > 0:
        order = shuffled(num_groups, shuffle)
    return [order[span.start : span.stop] for span in split_groups(num_groups, num_updates)]


def rows_of_groups(step_rows: StepRows, groups: IntArray) -> list[int]:
    """The numbers of the rows of these groups, in the groups' order."""
    place_G = np.full(step_rows.num_groups, -1)
    place_G[groups] = np.arange(len(groups))
    place_R = place_G[step_rows.group_R]
    chosen = np.flatnonzero(place_R >= 0)
    return chosen[np.argsort(place_R[chosen], kind="stable")].tolist()


def with_column(row: TokenRow, name: str, values: np.ndarray) -> TokenRow:
    """The row with a column whose values belong to its trained tokens, in order; 0 elsewhere."""
    column_T = np.zeros(len(row), dtype=np.float32)
    column_T[row.weights_T > 0] = values
    return replace(row, columns={**row.columns, name: column_T})


@dataclass(frozen=True, slots=True)
class Update:
    """An update over some rows, and the rows that it leaves out because their gradient is 0.

    `plan` is None where nothing has a gradient, `loss` where no row is trained at all.
    """

    plan: StepPlan | None
    left_out: list[TokenRow]
    loss: LossSpec | None


def build_update(
    step_rows: StepRows,
    advantages_S: Sequence[np.ndarray],
    *,
    chosen: Sequence[int],
    config: LearningSettings,
    sizes: TrainerConfig,
    kl_coefficient: float | None,
    step: int,
    epoch: int,
    truth: Sequence[TokenRow] = (),
) -> Update:
    """Return an update on the chosen rows and on the rows of `truth`."""
    algorithm, rollout = policy_gradient(config.algorithm), config.rollout
    rows, weight_R, denominator = _row_weights(step_rows, chosen, config)
    # The routers' loss has a gradient in every row, too.
    needs_all = algorithm.has_other_terms or config.model.moe.has_loss
    keep_all = needs_all or not algorithm.skip_zero_advantage
    counted = []
    for row, weight, index in zip(rows, weight_R, chosen, strict=True):
        advantage_T = advantages_S[step_rows.sample_R[index]]
        if weight > 0 and row.weights_T.any():
            places_T = step_rows.policy_places(index)
            weighted = _weighted(row, advantage_T, places_T, weight=float(weight))
            counted.append((weighted, keep_all or bool(np.any(advantage_T))))
    if not counted and not truth:
        return Update(None, [], None)
    spec = policy_spec(
        algorithm,
        denominator=denominator or 1.0,
        temperature=rollout.temperature,
        kl_coefficient=kl_coefficient,
        weight_mean=_weight_mean(rows, weight_R, config),
    )
    kept = [row for row, is_kept in counted if is_kept]
    left_out = [row for row, is_kept in counted if not is_kept]
    if truth:
        assert config.energy is not None, "rows of the truth belong to an energy"
        kept, left_out, spec = _with_truth(kept, left_out, truth, spec, config.energy)
    if not kept:
        return Update(None, left_out, spec)
    if config.is_strided:
        # Rows of a text are neighbours, whatever the order of groups.
        kept = sorted(kept, key=lambda row: row.row_id)
    batches = micro_batches(
        kept, sizes, num_data_groups=config.mesh.num_data_groups, nested=config.is_strided
    )
    return Update(StepPlan(step, epoch, batches, spec), left_out, spec)


def _with_truth(
    kept: list[TokenRow],
    left_out: list[TokenRow],
    truth: Sequence[TokenRow],
    spec: LossSpec,
    ebft: EbftConfig,
) -> tuple[list[TokenRow], list[TokenRow], LossSpec]:
    """Add the mean cross-entropy of the truth, times its coefficient, to the loss."""
    num_tokens = sum(int(row.weights_T.sum()) for row in truth)
    weight = ebft.ce_coefficient * spec.denominator / num_tokens
    spec = replace(spec, name="policy_and_truth")
    if not kept and not left_out:
        # No sampled row lends its columns to the truth, and the loss asks for them all the same.
        names = sorted(loss_of(spec).required(spec) - {TRUTH})
        truth = [_with_zeros(row, names) for row in truth]
    sampled, imitated = beside([*kept, *left_out], truth, weight=weight)
    return [*sampled[: len(kept)], *imitated], sampled[len(kept) :], spec


def _with_zeros(row: TokenRow, names: Sequence[str]) -> TokenRow:
    zeros = {name: np.zeros(len(row), dtype=np.float32) for name in names}
    return replace(row, columns={**row.columns, **zeros})


def _row_weights(
    step_rows: StepRows, chosen: Sequence[int], config: LearningSettings
) -> tuple[list[TokenRow], FloatArray64, float]:
    """Return the chosen rows, the weights of their trained tokens, and the denominator.

    A sample counts once, with the trained tokens of all its rows.
    """
    algorithm = policy_gradient(config.algorithm)
    rows = [step_rows.rows[index] for index in chosen]
    samples, sample_R = np.unique(step_rows.sample_R[list(chosen)], return_inverse=True)
    num_trained_S = np.zeros(len(samples), dtype=np.int64)
    np.add.at(num_trained_S, sample_R, [int(row.weights_T.sum()) for row in rows])
    weight_S, denominator = row_weights(
        num_trained_S,
        step_rows.trained_S[samples] & (num_trained_S > 0),
        normalise=algorithm.normalise,
        fixed_length=algorithm.fixed_length or config.rollout.max_new_tokens,
    )
    factor = 1.0 if config.energy is None else config.energy.rl_coefficient
    return rows, factor * weight_S[sample_R], denominator


def _weight_mean(rows: Sequence[TokenRow], weight_R: np.ndarray, config: LearningSettings) -> float:
    """Return the number by which the correction divides its weights; 1 if it does not normalise.

    It is a mean over all rows that the loss counts, including those without an advantage.
    """
    correction = policy_gradient(config.algorithm).correction
    if correction is None or correction.weight is None or not correction.normalise:
        return 1.0
    log_ratio, row_of, counts = [], [], []
    counted = np.flatnonzero(weight_R > 0).tolist()
    if not counted:
        return 1.0
    for index in counted:
        row = rows[index]
        trained_T = row.weights_T > 0
        names = ("old_logp", "engine_logp")
        old_M, engine_M = (dense(row.columns[name])[trained_T].astype(np.float64) for name in names)
        log_ratio.append(old_M - engine_M)
        row_of.append(np.full(len(old_M), index))
        counts.append(np.full(len(old_M), weight_R[index]))
    columns = (torch.from_numpy(np.concatenate(parts)) for parts in (log_ratio, row_of, counts))
    log_ratio_M, row_of_M, counts_M = columns
    rule = WeightRule.configured(correction.weight)
    return mean_weight(log_ratio_M, row_of_M, len(rows), rule, counts_M=counts_M)


def _weighted(
    row: TokenRow, advantage_T: np.ndarray, policy_places_T: IntArray, *, weight: float
) -> TokenRow:
    """The row with the advantages of its trained tokens and their weight in the loss."""
    values_M = advantage_T[policy_places_T[row.weights_T > 0]]
    row = with_column(row, "advantage", values_M)
    return replace(row, weights_T=(row.weights_T * weight).astype(np.float32))
