"""Importance weights within bounds.

    truncate   min(max(w, low), high)       truncated importance sampling (TIS)
    mask       w inside the bounds, else 0  IcePop

Truncation bounds the variance at the cost of a bias towards the engine's policy; a mask removes the
token's evidence altogether.

`normalise` divides by the mean weight of the update, with tokens counted as the loss counts them.
The mean is over the weights that are not masked: if masked ones were included, the remaining tokens
would be learnt from faster, the more tokens are masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from homeostat.algorithms.corrections.levels import Band, ratio_at
from homeostat.config.correction import AnyWeight

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The level, the bounds and the treatment of ratios outside them."""

    band: Band
    masks: bool

    @classmethod
    def of(cls, params: Mapping[str, float | str]) -> Self:
        """Read the rule from the parameters of a loss."""
        return cls(Band.of(params, "weight"), params["weight_outside"] == "mask")

    @classmethod
    def configured(cls, config: AnyWeight) -> Self:
        """Build the rule from a config."""
        return cls.of(weight_params(config))


def weight_params(config: AnyWeight) -> dict[str, float | str]:
    """Return the weight rule as parameters of a loss."""
    return {
        **Band(config.type, config.low or 0.0, config.high).params("weight"),
        "weight_outside": config.outside,
    }


def bounded(
    log_ratio_M: Tensor, row_of_M: Tensor, num_rows: int, rule: WeightRule
) -> tuple[Tensor, Tensor]:
    """Return the weight of every token, and masks of where a bound was applied."""
    ratio_M = ratio_at(log_ratio_M, row_of_M, num_rows, level=rule.band.level)
    outside_M = rule.band.outside(ratio_M)
    if rule.masks:
        return ratio_M.masked_fill(outside_M, 0.0), outside_M
    return ratio_M.clamp(rule.band.low, rule.band.high), outside_M


def mean_weight(
    log_ratio_M: Tensor, row_of_M: Tensor, num_rows: int, rule: WeightRule, *, counts_M: Tensor
) -> float:
    """Return the mean weight over all trained tokens of an update, as the loss counts them.

    It is 1 if all tokens are masked, and exactly 1 if every ratio is 1.
    """
    weight_M, outside_M = bounded(log_ratio_M, row_of_M, num_rows, rule)
    counted_M = counts_M * ~outside_M if rule.masks else counts_M
    total = float(counted_M.sum())
    return float((counted_M * weight_M).sum()) / total if total > 0 else 1.0
