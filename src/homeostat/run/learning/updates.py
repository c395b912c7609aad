"""From scored groups to optimizer updates.

    groups -> rewards -> advantages -> rows with columns -> updates -> micro-batches

Groups stay whole: update u of U gets groups [u P / U, (u + 1) P / U). Weights and denominator of
the loss are those of the whole update. The first update of a step needs no old log-probs: its own
are the old ones, so that the ratio is exactly 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from homeostat.algorithms.baselines import RewardBatch
from homeostat.algorithms.catalogue import advantages
from homeostat.algorithms.corrections.weight import WeightRule, mean_weight
from homeostat.algorithms.normalise import row_weights
from homeostat.algorithms.overlong import penalty as overlong_penalty
from homeostat.algorithms.policy import policy_spec
from homeostat.config.run import RunConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.data.loader import micro_batches
from homeostat.types import (
    LossSpec,
    RolloutGroup,
    Sample,
    StepPlan,
    TokenRow,
)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The samples of a step as rows, one for each, in the groups' order.

    Weights are 1 for the tokens that the policy sampled, which are the ones that can be trained,
    and 0 for the prompt and for what a tool or user wrote. `engine_logp` is a column of every row.
    `lengths_S` counts the policy's tokens; `starts_S` is where the completion begins in its row.
    """

    rows: list[TokenRow]
    group_S: np.ndarray
    starts_S: np.ndarray
    lengths_S: np.ndarray
    rewards_S: np.ndarray
    trained_S: np.ndarray
    penalty_S: np.ndarray


def step_rows(groups: Sequence[RolloutGroup], config: RunConfig) -> StepRows:
    """Rows that can be scored; the reward of an overlong sample is shaped here."""
    samples = [sample for group in groups for sample in group.samples]
    group_S = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
    rows = [
        _row(number, groups[int(group)], sample)
        for number, (group, sample) in enumerate(zip(group_S, samples, strict=True))
    ]
    rewards = [math.nan if s.reward is None else s.reward for s in samples]
    penalty_S = np.array([_shaping(sample, config) for sample in samples])
    masks_overlong = config.algorithm.overlong.type == "mask"
    trained = [
        s.reward is not None
        and s.completion.num_policy_tokens > 0
        and not (masks_overlong and s.completion.stop_reason.is_cut)
        for s in samples
    ]
    return StepRows(
        rows=rows,
        group_S=group_S,
        starts_S=np.array([len(groups[int(g)].prompt.tokens_T) for g in group_S], dtype=np.int64),
        lengths_S=np.array([s.completion.num_policy_tokens for s in samples], dtype=np.int64),
        rewards_S=np.array(rewards) + penalty_S,
        trained_S=np.array(trained),
        penalty_S=penalty_S,
    )


def _row(number: int, group: RolloutGroup, sample: Sample) -> TokenRow:
    prompt_T, completion = group.prompt.tokens_T, sample.completion
    context = np.zeros(len(prompt_T), dtype=np.float32)
    row = TokenRow(
        row_id=number,
        tokens_T=np.concatenate([prompt_T, completion.tokens_T]),
        weights_T=np.concatenate([context, completion.by_policy_T.astype(np.float32)]),
    )
    return with_column(row, "engine_logp", completion.engine_logp_T[completion.by_policy_T])


def _shaping(sample: Sample, config: RunConfig) -> float:
    overlong = config.algorithm.overlong
    if overlong.type != "shape":
        return 0.0
    return overlong_penalty(
        sample.completion.num_policy_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        buffer_tokens=overlong.buffer(config.rollout.max_new_tokens),
        penalty=overlong.penalty,
    )


def step_advantages(
    step: StepRows, config: RunConfig, *, penalty_ST: list[np.ndarray] | None
) -> list[np.ndarray]:
    """Per sample, one value for each token that the policy sampled. `penalty_ST`: KL in the reward,
    times its weight, for the same tokens."""
    batch = RewardBatch(
        rewards_S=step.rewards_S,
        group_S=step.group_S,
        lengths_S=step.lengths_S,
        trained_S=step.trained_S,
        penalty_ST=penalty_ST,
    )
    return advantages(config.algorithm, batch)


def split_groups(num_groups: int, num_updates: int) -> list[range]:
    """Groups of each update; fewer updates where there are fewer groups."""
    borders = [update * num_groups // num_updates for update in range(num_updates + 1)]
    spans = [range(*pair) for pair in pairwise(borders)]
    return [span for span in spans if len(span)]


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
    rows: Sequence[TokenRow],
    advantages_R: Sequence[np.ndarray],
    trained_R: np.ndarray,
    *,
    config: RunConfig,
    sizes: TrainerConfig,
    kl_coefficient: float | None,
    step: int,
    epoch: int,
) -> Update:
    """One update over these rows."""
    algorithm, rollout = config.algorithm, config.rollout
    num_trained_R = np.array([int(row.weights_T.sum()) for row in rows], dtype=np.int64)
    weight_R, denominator = row_weights(
        num_trained_R,
        trained_R & (num_trained_R > 0),
        normalise=algorithm.normalise,
        fixed_length=algorithm.fixed_length or rollout.max_new_tokens,
    )
    needs_all = algorithm.entropy_bonus > 0 or (
        algorithm.kl is not None and algorithm.kl.place == "loss"
    )
    keep_all = needs_all or not algorithm.skip_zero_advantage
    counted = [
        (_weighted(row, advantage_T, float(weight)), keep_all or bool(np.any(advantage_T)))
        for row, advantage_T, weight in zip(rows, advantages_R, weight_R, strict=True)
        if weight > 0
    ]
    if not counted:
        return Update(None, [], None)
    spec = policy_spec(
        algorithm,
        denominator=denominator,
        temperature=rollout.temperature,
        kl_coefficient=kl_coefficient,
        weight_mean=_weight_mean(rows, weight_R, config),
    )
    kept = [row for row, is_kept in counted if is_kept]
    left_out = [row for row, is_kept in counted if not is_kept]
    if not kept:
        return Update(None, left_out, spec)
    batches = micro_batches(kept, sizes, num_data_groups=config.mesh.num_data_groups)
    return Update(StepPlan(step, epoch, batches, spec), left_out, spec)


def _weight_mean(rows: Sequence[TokenRow], weight_R: np.ndarray, config: RunConfig) -> float:
    """What the correction divides its weights by: a mean over all rows that the loss counts, those
    without an advantage, too. 1 where it does not normalise."""
    correction = config.algorithm.correction
    if correction is None or correction.weight is None or not correction.normalise:
        return 1.0
    log_ratio, row_of, counts = [], [], []
    for index in np.flatnonzero(weight_R > 0).tolist():
        row = rows[index]
        trained_T = row.weights_T > 0
        names = ("old_logp", "engine_logp")
        old_M, engine_M = (row.columns[name][trained_T].astype(np.float64) for name in names)
        log_ratio.append(old_M - engine_M)
        row_of.append(np.full(len(old_M), index))
        counts.append(np.full(len(old_M), weight_R[index]))
    columns = (torch.from_numpy(np.concatenate(parts)) for parts in (log_ratio, row_of, counts))
    log_ratio_M, row_of_M, counts_M = columns
    rule = WeightRule.configured(correction.weight)
    return mean_weight(log_ratio_M, row_of_M, len(rows), rule, counts_M=counts_M)


def _weighted(row: TokenRow, advantage_T: np.ndarray, weight: float) -> TokenRow:
    row = with_column(row, "advantage", advantage_T)
    return replace(row, weights_T=(row.weights_T * weight).astype(np.float32))
