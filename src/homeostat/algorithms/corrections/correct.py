"""Combine all corrections of a loss into the factor that multiplies the surrogate.

Only the surrogate is corrected. Its advantage is evidence from a sample, and a sample of another
policy is weaker evidence. The KL term and the entropy hold the policy back wherever it is
evaluated; if they were masked along with the evidence, they would stop doing so exactly where the
data is worst.

Denominators are those of the whole update before anything is left out, so a token that is left out
contributes a gradient of 0. If the sum were divided by what remains, the step would grow as the
data gets worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from homeostat.algorithms.corrections.levels import Band
from homeostat.algorithms.corrections.off_policy import off_policy
from homeostat.algorithms.corrections.reject import rejected
from homeostat.algorithms.corrections.veto import rows_with, vetoed
from homeostat.algorithms.corrections.weight import WeightRule, bounded, weight_params
from homeostat.algorithms.terms import PolicyTokens
from homeostat.config.correction import CorrectionConfig

if TYPE_CHECKING:
    from torch import Tensor

PARTS = ("weight_level", "reject_level", "veto", "off_policy_mask")


def correction_params(
    config: CorrectionConfig | None, *, weight_mean: float
) -> dict[str, float | str]:
    """Return the correction as parameters of a loss.

    Weights are divided by `weight_mean`; 1 means no normalisation.
    """
    params: dict[str, float | str] = {}
    if config is None:
        return params
    if config.weight is not None:
        params |= {**weight_params(config.weight), "weight_mean": weight_mean}
    if config.reject is not None:
        band = Band(config.reject.type, config.reject.low, config.reject.high)
        params |= band.params("reject")
    if config.veto is not None:
        params["veto"] = config.veto
    if config.off_policy_mask is not None:
        params["off_policy_mask"] = config.off_policy_mask
    return params


@dataclass(frozen=True, slots=True)
class Correction:
    """The factor of the surrogate at every token, detached, and where each part acted."""

    factor_M: Tensor
    acted: dict[str, Tensor]

    def sums(self, row_of_M: Tensor, num_rows: int) -> dict[str, Tensor]:
        """Return the sum of the factors, and the tokens and sequences on which each part acted."""
        every_M = row_of_M.new_ones(row_of_M.shape)
        found = {
            "factor": self.factor_M.sum(),
            "sequences": rows_with(every_M, row_of_M, num_rows).sum(),
        }
        for name, acted_M in self.acted.items():
            found[f"tokens_{name}"] = acted_M.sum()
            found[f"sequences_{name}"] = rows_with(acted_M, row_of_M, num_rows).sum()
        return {name: value.to(self.factor_M.dtype) for name, value in found.items()}


def correct(
    tokens: PolicyTokens, old_M: Tensor, params: Mapping[str, float | str]
) -> Correction | None:
    """Compute the correction; None if the loss has none."""
    if not any(part in params for part in PARTS):
        return None
    engine_M = tokens.engine_logp_M
    assert engine_M is not None, "a correction needs the engine's log-probs"
    # Old, not current log-probs: the mismatch of engine and trainer must not change with each
    # update.
    log_ratio_M, rows = old_M - engine_M, (tokens.row_of_M, tokens.num_rows)
    factor_M = log_ratio_M.new_ones(log_ratio_M.shape)
    # Without a weight the factor would be 1 even for a NaN, which would hide it.
    factor_M = factor_M.masked_fill(log_ratio_M.isnan(), math.nan)
    acted: dict[str, Tensor] = {}
    if "weight_level" in params:
        rule = WeightRule.of(params)
        weight_M, outside_M = bounded(log_ratio_M, *rows, rule)
        factor_M = weight_M / float(params["weight_mean"])
        acted["masked" if rule.masks else "truncated"] = outside_M
    drops = _drops(tokens, engine_M, log_ratio_M, params)
    for drop_M in drops.values():
        # Multiply instead of masking, so that a NaN stays NaN.
        factor_M = factor_M * ~drop_M
    return Correction(factor_M, acted | drops)


def _drops(
    tokens: PolicyTokens, engine_M: Tensor, log_ratio_M: Tensor, params: Mapping[str, float | str]
) -> dict[str, Tensor]:
    """Return masks of the tokens that each part leaves out."""
    rows, drops = (tokens.row_of_M, tokens.num_rows), {}
    if "reject_level" in params:
        drops["rejected"] = rejected(log_ratio_M, *rows, Band.of(params, "reject"))
    if "veto" in params:
        drops["vetoed"] = vetoed(log_ratio_M, *rows, float(params["veto"]))
    if "off_policy_mask" in params:
        drops["off_policy"] = off_policy(tokens, engine_M, float(params["off_policy_mask"]))
    return drops
