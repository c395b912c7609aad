"""Measure the mismatch of engine and trainer on the tokens of a step, on the host in float64.

    log w_m = trainer_logp_m - engine_logp_m      trainer: at the beginning of the step
    k3      = mean(w - 1 - log w)                 estimates KL(engine || trainer), never negative
    ess     = (sum w)^2 / (n sum w^2)             of tokens, and of sequences by their products

The effective sample size is the share of the sample that an importance-weighted mean is worth: 1 if
all ratios are equal, 1/n if one weight outweighs all others. That of sequences falls with their
length, which shows what sequence-level weights would cost. `age` is the number of policy versions
between a token's policy and that of the step; 0 is on-policy. A NaN propagates to every result that
includes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from homeostat.algorithms.clip import MAX_LOG_RATIO
from homeostat.arrays import BoolArray, FloatArray64, IntArray

# Differences above this are reported: rounding in a healthy engine does not cause them. Errors grow
# with the logits, so the limit grows with |logp|: 5% is about ten rounding errors in bfloat16.
NOTABLE, NOTABLE_SHARE = 0.1, 0.05


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """The log-probs that engine and trainer give to the same tokens.

    Rows are complete: `row_of_M` says to which row a token belongs. `age_M` is None if the engine's
    versions are not those of this run.
    """

    engine_logp_M: FloatArray64
    trainer_logp_M: FloatArray64
    row_of_M: IntArray
    age_M: IntArray | None = None

    def __post_init__(self) -> None:
        sizes = {len(self.engine_logp_M), len(self.trainer_logp_M), len(self.row_of_M)}
        assert len(sizes) == 1, f"arrays of the same tokens have {sizes} tokens"
        assert self.age_M is None or len(self.age_M) in sizes

    @property
    def log_ratio_M(self) -> FloatArray64:
        """Return the log-ratio of trainer to engine at every token."""
        return self.trainer_logp_M - self.engine_logp_M


def mismatch_metrics(pairs: TokenPairs) -> dict[str, float]:
    """Return the metrics by their names in observe/names.py; none if there is no token."""
    log_M = pairs.log_ratio_M
    if not len(log_M):
        return {}
    distance_M, ratio_M = np.abs(log_M), _ratio(log_M)
    metrics = {
        "sampling/sampling_logp_difference/mean": distance_M.mean(),
        "sampling/sampling_logp_difference/max": distance_M.max(),
        "sampling/importance_sampling_ratio/mean": ratio_M.mean(),
        "sampling/importance_sampling_ratio/max": ratio_M.max(),
        "sampling/importance_sampling_ratio/min": ratio_M.min(),
        "sampling/k3": k3(log_M),
        "sampling/ess": effective_share(log_M),
        "sampling/ess_sequence": effective_share(_row_sums(log_M, pairs.row_of_M)),
    }
    found = {name: float(value) for name, value in metrics.items()}
    return found | (_by_age(log_M, pairs.age_M) if pairs.age_M is not None else {})


def _by_age(log_M: FloatArray64, age_M: IntArray) -> dict[str, float]:
    metrics = {"stale/steps/mean": float(age_M.mean()), "stale/steps/max": float(age_M.max())}
    for age in np.unique(age_M).tolist():
        chosen_M = log_M[age_M == age]
        metrics |= {
            f"sampling/by_age/{age}/share": len(chosen_M) / len(log_M),
            f"sampling/by_age/{age}/logp_difference": float(np.abs(chosen_M).mean()),
            f"sampling/by_age/{age}/k3": k3(chosen_M),
            f"sampling/by_age/{age}/ess": effective_share(chosen_M),
        }
    return metrics


def k3(log_ratio_M: FloatArray64) -> float:
    """Return the k3 estimate of the KL divergence."""
    # One absurd token must not make the mean infinite; a NaN still passes through.
    log_M = np.minimum(log_ratio_M, MAX_LOG_RATIO)
    return float((np.expm1(log_M) - log_M).mean())


def effective_share(log_weights: FloatArray64) -> float:
    """Return the effective sample size of the weights exp(.), as a share.

    The largest weight is factored out first, so nothing overflows.
    """
    # The share does not depend on a common factor of the weights.
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def is_notable(pairs: TokenPairs) -> BoolArray:
    """Return where the two differ by more than rounding; a NaN counts as different."""
    size_M = np.minimum(np.abs(pairs.engine_logp_M), np.abs(pairs.trainer_logp_M))
    # Negated, so that a NaN, for which every comparison is False, counts as different.
    return ~(np.abs(pairs.log_ratio_M) <= NOTABLE + NOTABLE_SHARE * size_M)


def furthest(pairs: TokenPairs, count: int) -> IntArray:
    """Return the tokens with the largest differences, largest first; a NaN is the largest."""
    distance_M = np.nan_to_num(np.abs(pairs.log_ratio_M), nan=np.inf)
    return np.argsort(-distance_M, kind="stable")[:count]


def _ratio(log_ratio: FloatArray64) -> FloatArray64:
    return np.exp(np.minimum(log_ratio, MAX_LOG_RATIO))


def _row_sums(values_M: FloatArray64, row_of_M: IntArray) -> FloatArray64:
    # Row numbers may have gaps, because rows without trained tokens are missing.
    _, index_M = np.unique(row_of_M, return_inverse=True)
    return np.bincount(index_M, weights=values_M).astype(np.float64, copy=False)
