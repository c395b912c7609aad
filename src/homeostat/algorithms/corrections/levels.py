"""The level of a ratio: a token, a sequence, or the geometric mean of a sequence.

    token      log w_m
    sequence   sum over the row's trained tokens
    geometric  mean over the row's trained tokens

The value of a row is repeated at each of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, cast

from homeostat.algorithms.clip import ratio_of
from homeostat.algorithms.normalise import row_means

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True)
class Band:
    """Bounds of a ratio at a level. A `low` of 0 means no lower bound."""

    level: Level
    low: float
    high: float

    @classmethod
    def of(cls, params: Mapping[str, float | str], name: str) -> Self:
        """Read the band of one part from the parameters of a loss."""
        level = cast(Level, params[f"{name}_level"])
        return cls(level, float(params[f"{name}_low"]), float(params[f"{name}_high"]))

    def params(self, name: str) -> dict[str, float | str]:
        """Return the band as parameters of a loss."""
        return {f"{name}_level": self.level, f"{name}_low": self.low, f"{name}_high": self.high}

    def outside(self, ratio_M: Tensor) -> Tensor:
        """Return a mask of ratios outside the bounds.

        It is False for a NaN, which must reach the loss.
        """
        return (ratio_M < self.low) | (ratio_M > self.high)


def ratio_at(log_ratio_M: Tensor, row_of_M: Tensor, num_rows: int, *, level: Level) -> Tensor:
    """Return the ratio at a level, for every token."""
    if level == "token":
        return ratio_of(log_ratio_M)
    if level == "geometric":
        return ratio_of(row_means(log_ratio_M, row_of_M, num_rows))[row_of_M]
    # The product of ratios as a sum of logarithms, which does not overflow.
    sum_B = log_ratio_M.new_zeros(num_rows).index_add(0, row_of_M, log_ratio_M)
    return ratio_of(sum_B)[row_of_M]
