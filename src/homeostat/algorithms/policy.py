"""The loss of a policy-gradient update.

    loss_m = c_m * surrogate_m + kl_coefficient * kl_m - entropy_bonus * H_m
    loss   = sum_m w_m * loss_m / denominator

over the trained tokens of all micro-batches. Weights and denominator belong to the whole update
(`normalise`), the surrogate to the algorithm, c_m to the correction (`corrections`). With
`kl_importance_weighted`, kl_m is multiplied by the token's ratio of new to old policy, and the
gradient of that ratio counts, too.

Measurements are returned as unweighted sums over tokens: divide by `tokens` for means. `kl` is the
chosen estimator against the reference, `old_kl` estimates KL(old || new); the effects of the
correction are counted in tokens and in sequences. The mismatch of engine and trainer is not
measured here but on the host (`mismatch`). No NaN is hidden: it reaches the loss, and the update is
not applied.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from homeostat.algorithms.catalogue import algorithm_of
from homeostat.algorithms.clip import ratio_of
from homeostat.algorithms.corrections.correct import correct, correction_params
from homeostat.algorithms.kl import ESTIMATORS, k3
from homeostat.algorithms.normalise import row_means
from homeostat.algorithms.terms import LossTerms, PolicyTokens, Surrogate
from homeostat.config.algorithm import AnyPolicyGradient
from homeostat.types import LossSpec

if TYPE_CHECKING:
    from torch import Tensor


def policy_spec(
    config: AnyPolicyGradient,
    *,
    denominator: float,
    temperature: float,
    kl_coefficient: float | None,
    weight_mean: float = 1.0,
) -> LossSpec:
    """Return the loss of one update.

    `kl_coefficient` is its current value if it adapts; the correction's weights are divided by
    `weight_mean`.
    """
    assert denominator > 0, "an update in which nothing is trained has no loss"
    params: dict[str, float | str] = {
        "algorithm": config.type,
        "temperature": temperature,
        "clip_low": config.clip_low,
        "clip_high": config.clip_high,
        "entropy_bonus": config.entropy_bonus,
        **config.surrogate_params,
    }
    if config.dual_clip is not None:
        params["dual_clip"] = config.dual_clip
    if config.kl is not None:
        params["kl_estimator"] = config.kl.estimator
    if config.kl is not None and config.kl.place == "loss":
        given = config.kl.coefficient if kl_coefficient is None else kl_coefficient
        params["kl_coefficient"] = given
        params["kl_importance_weighted"] = float(config.kl.importance_weighted)
    params |= correction_params(config.correction, weight_mean=weight_mean)
    return LossSpec(name="policy", denominator=denominator, params=params)


def policy_loss(tokens: PolicyTokens, spec: LossSpec) -> LossTerms:
    """Compute this micro-batch's share of the update's loss."""
    now_M, params = tokens.trainer_logp_M, spec.params
    # In the first update the weights are those that sampled: the ratio is exactly 1 but keeps its
    # gradient.
    old_M = now_M.detach() if tokens.old_logp_M is None else tokens.old_logp_M
    log_ratio_M = now_M - old_M
    algorithm = algorithm_of(str(params["algorithm"]))
    surrogate = algorithm.surrogate(tokens, log_ratio_M, params)
    correction = correct(tokens, old_M, params)
    kl_M = _kl(tokens, spec)
    loss_M = surrogate.loss_M
    if correction is not None:
        # Only the surrogate is corrected; the KL term and the entropy bonus below are not.
        loss_M = correction.factor_M * loss_M
    if "kl_coefficient" in params:
        assert kl_M is not None, "a KL penalty needs the reference's log-probs"
        weighted_M = kl_M * ratio_of(log_ratio_M) if params["kl_importance_weighted"] else kl_M
        loss_M = loss_M + float(params["kl_coefficient"]) * weighted_M
    if params["entropy_bonus"]:
        loss_M = loss_M - float(params["entropy_bonus"]) * tokens.entropy_M
    measured = _measure(tokens, surrogate, kl_M, old_M)
    sums = {name: values_M.sum() for name, values_M in measured.items()}
    if correction is not None:
        sums |= correction.sums(tokens.row_of_M, tokens.num_rows)
    ratio_M = measured["ratio"]
    return LossTerms(
        loss=(tokens.weights_M * loss_M).sum() / spec.denominator,
        row_losses_B=row_means(loss_M.detach(), tokens.row_of_M, tokens.num_rows),
        sums=sums,
        # Micro-batches are merged by their maximum, so a minimum is sent as the maximum of the
        # negative.
        maxima={"ratio_max": _max(ratio_M), "ratio_min_neg": _max(-ratio_M)},
    )


def _kl(tokens: PolicyTokens, spec: LossSpec) -> Tensor | None:
    if tokens.ref_logp_M is None:
        return None
    estimator = ESTIMATORS[str(spec.params["kl_estimator"])]
    return estimator(tokens.trainer_logp_M, tokens.ref_logp_M)


def _measure(
    tokens: PolicyTokens, surrogate: Surrogate, kl_M: Tensor | None, old_M: Tensor
) -> dict[str, Tensor]:
    """Return the measurements per token, which are then summed."""
    now_M = tokens.trainer_logp_M.detach()
    measured = {
        "tokens": now_M.new_ones(now_M.shape),
        "entropy": tokens.entropy_M.detach(),
        "ratio": surrogate.ratio_M,
        "clip_low": surrogate.low_M.to(now_M.dtype),
        "clip_high": surrogate.high_M.to(now_M.dtype),
        "dual_clip": surrogate.dual_M.to(now_M.dtype),
        "old_kl": k3(old_M, now_M),
    }
    if kl_M is not None:
        measured["kl"] = kl_M.detach()
    return measured


def _max(values_M: Tensor) -> Tensor:
    """Return the maximum, or -inf if there is no token."""
    return values_M.max() if values_M.numel() else values_M.new_full((), -math.inf)
